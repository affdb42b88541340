"""What is said to run: the list in the package, `samovar models`, and the page in docs."""

from __future__ import annotations

import pytest

from samovar.cli.main import main
from samovar.models.generic.verdicts import PATH, refusal, verdicts
from samovar.models.registry import ARCHITECTURES
from tests.models.generic.sweep import architectures, judge
from tools import models_doc

LEAST = 100
"""Architectures that must pass."""


def test_the_page_is_current() -> None:
    assert models_doc.complaint() is None
    page = models_doc.render()
    assert all(name in page for name in (*ARCHITECTURES, *verdicts()))


def test_the_list_is_of_these_transformers() -> None:
    """Another version of Transformers may know other architectures: then the list has to be written again."""
    import transformers

    if f"Transformers {transformers.__version__}." in PATH.read_text():
        assert set(verdicts()) == set(architectures())


def test_enough_architectures_pass() -> None:
    assert sum(not verdict.refusal for verdict in verdicts().values()) >= LEAST
    assert refusal("GPTNeoXForCausalLM") is None
    assert refusal("BloomForCausalLM") == "it counts positions by itself"
    assert refusal("NoSuchForCausalLM") == "it was not tested with Transformers"
    unfinished = [
        v for v in verdicts().values() if v.refusal.startswith(("not tested", "it fails", "its results differ"))
    ]
    assert unfinished == []


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (["gptneoxf"], ["GPTNeoXForCausalLM  generic  through Transformers"]),
        (["STABLELMFOR"], ["StableLmForCausalLM  native  samovar/models/starcoder2.py"]),
        (["bloom"], ["BloomForCausalLM  unsupported  it counts positions by itself"]),
    ],
)
def test_models_are_listed_by_name(words: list[str], lines: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", *words]) == 0
    found = capsys.readouterr().out.splitlines()
    assert len(found) == len(lines)
    assert all(got.startswith(wanted) for got, wanted in zip(found, lines, strict=True))


def test_unsupported_ones_are_listed_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    assert "unsupported" not in capsys.readouterr().out
    assert main(["models", "--unsupported"]) == 0
    assert "BloomForCausalLM " in capsys.readouterr().out
    assert main(["models", "nothing-like-it"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("architecture", sorted(verdicts()))
def test_the_list_is_what_the_test_finds(architecture: str) -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    if f"Transformers {transformers.__version__}." not in PATH.read_text():
        pytest.skip("the list is of another version of Transformers")
    assert judge(architectures()[architecture], architecture) == verdicts()[architecture]
