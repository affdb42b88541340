"""A sentence hidden in a long text, and a question about it: what is found again, by length of the text and depth in it.

The text is made of generated sentences, so that no model has read it; the needles are numbers, so that none can be guessed.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from samovar.cli.bench.circumstances import described
from samovar.cli.bench.offline import whole_numbers
from samovar.cli.connection import ENGINE_OPTIONS
from samovar.cli.eval.asking import AskingOptions, answers, is_chat, paired, report, share
from samovar.cli.eval.opened import AgainstOptions, circumstances, opened, runs_of
from samovar.cli.eval.report import plain
from samovar.cli.output import table
from samovar.config.field import Group, field
from samovar.config.groups import SourceConfig
from samovar.config.load import Settings
from samovar.errors import ConfigError

if TYPE_CHECKING:
    from samovar.engine.llm import LLM
    from samovar.text.tokenizer import Tokenizer

USAGE = "samovar eval needle [MODEL] [--against MODEL] [flags]"
POSITIONAL = "model"

CITIES = "Lisbon Oslo Nairobi Lima Hanoi Quito Dublin Cairo Riga Osaka Tunis Havana Bergen Accra Porto Dakar".split()
PEOPLE = "gardener baker teacher sailor painter farmer doctor writer carpenter singer hunter weaver clerk".split()
VERBS = "carried found painted repaired sold borrowed counted cleaned described forgot measured opened".split()
THINGS = "basket ladder window blanket barrel letter lantern bridge wagon mirror table fence bell rope".split()
PLACES = "river market hill forest station harbour school mill valley garden church road".split()
TIMES = "In spring,Before noon,After the rain,One evening,Last winter,At dawn,On Sunday,Years ago".split(",")

NEEDLE = "The secret number of {city} is {number}."
QUESTION = "What is the secret number of {city}, which the text names?"
ROOM = 120
"""Tokens of a prompt besides the text and of its answer: question, template, number."""
ANSWER_TOKENS = 32


class NeedleOptions(Group):
    """What is hidden where."""

    lengths: list[str] = field(factory=lambda: ["512", "1k", "2k", "4k"])
    """Tokens of the texts; longer ones than the model takes are left out."""
    depths: list[str] = field(factory=lambda: ["1", "25", "50", "75", "100"])
    """Where the needle lies, in percent of the text: 100 is its end."""
    repeats: int = field(default=2, ge=1)
    """Texts and needles for each length and depth."""


OPTIONS = (NeedleOptions, AskingOptions, AgainstOptions, SourceConfig, *ENGINE_OPTIONS)


@dataclass(frozen=True, slots=True)
class Case:
    """One text with its needle."""

    length: int
    depth: int
    repeat: int

    @property
    def city(self) -> str:
        """Whose number is hidden."""
        return self._random("needle").choice(CITIES)

    @property
    def number(self) -> str:
        """The hidden number: six digits."""
        return str(self._random("number").randrange(100_000, 1_000_000))

    def text(self, tokenizer: Tokenizer) -> str:
        """About `length` tokens of sentences, never more, the needle among them."""
        needle = NEEDLE.format(city=self.city, number=self.number)
        # The sentences of one repeat are the same at every depth: what a format loses is not mixed with luck.
        generator = random.Random(f"text {self.length} {self.repeat}")
        sentences: list[str] = []
        room = self.length - _tokens(tokenizer, needle)
        while (taken := _tokens(tokenizer, sentence := _sentence(generator))) <= room:
            sentences.append(sentence)
            room -= taken
        at = round(len(sentences) * self.depth / 100)
        return " ".join([*sentences[:at], needle, *sentences[at:]])

    def _random(self, what: str) -> random.Random:
        return random.Random(f"{what} {self.length} {self.depth} {self.repeat}")


def _sentence(generator: random.Random) -> str:
    time, person, verb = generator.choice(TIMES), generator.choice(PEOPLE), generator.choice(VERBS)
    thing, place = generator.choice(THINGS), generator.choice(PLACES)
    return f"{time} the {person} {verb} a {thing} near the {place}."


def _tokens(tokenizer: Tokenizer, sentence: str) -> int:
    return len(tokenizer.encode(" " + sentence, add_special_tokens=False))


def run(settings: Settings) -> int:
    """Ask one model, or two one after the other, and print."""
    options, needles = settings[AgainstOptions], settings[NeedleOptions]
    lengths, depths = whole_numbers("--lengths", needles.lengths), whole_numbers("--depths", needles.depths)
    if max(depths) > 100:
        raise ConfigError(f"--depths must be percents from 1 to 100, got {max(depths)}")
    runs, about = runs_of(settings), list[dict[str, Any]]()
    found: list[dict[Case, bool]] = []
    for _, flags in runs:
        with opened(flags) as llm:
            about.append(circumstances(llm))
            fitting = [length for length in lengths if length + ROOM <= llm.info.max_model_len]
            if not fitting:
                raise ConfigError(
                    f"--lengths {min(lengths)} and {ROOM} tokens for the question are more than the "
                    f"{llm.info.max_model_len} that the model takes"
                )
            cases = [Case(*case) for case in product(fitting, depths, range(needles.repeats))]
            found.append(search(llm, cases, settings))
    names, results = [name for name, _ in runs], [share(list(one.values())) for one in found]
    both = [case for case in found[0] if case in found[-1]]  # one context may be shorter
    comparison = paired(*([one[case] for case in both] for one in found)) if len(found) == 2 else None
    if options.json:
        models = [{"model": n, **r, "cells": cells(one)} for n, r, one in zip(names, results, found, strict=True)]
        print(json.dumps(plain({"models": models, "comparison": comparison, "circumstances": about[0]}), indent=2))
        return 0
    for name, one in zip(names, found, strict=True):
        print(grid(name, one), end="\n\n")
    print(report(names, results, comparison), described(about[0]), sep="\n")
    return 0


def search(llm: LLM, cases: list[Case], settings: Settings) -> dict[Case, bool]:
    """Whether the model says each hidden number."""
    chat, tokenizer = is_chat(llm, settings[AskingOptions]), llm.get_tokenizer()
    form = "{text}\n\n{question}" if chat else "{text}\n\nQuestion: {question}\nAnswer: The secret number of {city} is"
    prompts = [
        form.format(text=case.text(tokenizer), question=QUESTION.format(city=case.city), city=case.city)
        for case in cases
    ]
    said = answers(llm, prompts, chat=chat, max_tokens=ANSWER_TOKENS, stop=["\n"])
    return {case: case.number in text.replace(",", "") for case, text in zip(cases, said, strict=True)}


def cells(found: dict[Case, bool]) -> list[dict[str, Any]]:
    """Right answers by length and depth."""
    keys = sorted({(case.length, case.depth) for case in found})
    return [
        {
            "length": length,
            "depth": depth,
            **_count([hit for case, hit in found.items() if _is_at(case, length, depth)]),
        }
        for length, depth in keys
    ]


def _is_at(case: Case, length: int, depth: int) -> bool:
    return (case.length, case.depth) == (length, depth)


def _count(hits: list[bool]) -> dict[str, int]:
    return {"right": sum(hits), "asked": len(hits)}


def grid(name: str, found: dict[Case, bool]) -> str:
    """Right answers of one model by length (rows) and depth (columns)."""
    by_place = {(cell["length"], cell["depth"]): f"{cell['right']}/{cell['asked']}" for cell in cells(found)}
    lengths, depths = sorted({length for length, _ in by_place}), sorted({depth for _, depth in by_place})
    rows = [["tokens", *(f"{depth} %" for depth in depths)]]
    rows += [[f"{length:,}", *(by_place[length, depth] for depth in depths)] for length in lengths]
    return f"{name}: found at each depth\n" + table(rows, right=range(len(rows[0])))
