"""Writes docs/models.md from the registry and the generic path's verdicts; `python -m tools.models_doc` updates it."""

from __future__ import annotations

from collections import defaultdict

from samovar.cli.models import support
from samovar.models.generic.verdicts import PATH as VERDICTS
from tools.source import ROOT

PATH = ROOT / "docs" / "models.md"
INTRODUCTION = """\
# Models

Generated from `samovar/models/registry.py` and `{verdicts}` by `python -m tools.models_doc`; a gate fails when it is out of
date. `samovar models` prints the same, `samovar models NAME` what is said of one. Names are those of `architectures` in a
config.json.

* **Native**: a file of its own in `samovar/models/`, with everything the engine has: fused kernels, whole steps in one call
  on a CPU, GGUF files where their names are known, several devices. Each is compared with Transformers in float32, see
  [add_a_model.md](add_a_model.md).
* **Generic**: the class of Transformers (`pip install 'samovar[generic]'`), with our attention over the paged cache, our
  linears and experts in every weight format, and our loading: prefix cache, chunked prefill, continuous batching and the
  memory plan are the same. It runs layer by layer, and norms, rope and activations are Transformers'. The start says
  "generic path". Images and sound are not taken.
* **Unsupported**: with the reason.

An architecture is generic if it passes the test: a tiny random checkpoint, written by Transformers, gives the same greedy
ids, and logits within 1e-4 in float32, for whole prompts, chunks in mixed batches and shared prefixes.
`python -m tests.models.generic.sweep` tests all of them and writes the list. What is not on it is refused; `--model-impl any`
tries it nevertheless, `--model-impl generic` takes the generic path where there is a native family, to compare them. Code in
a model repository is never run.
"""
SUMMARY = "{native} native, {generic} generic, {unsupported} unsupported."


def render() -> str:
    """The whole page."""
    rows = defaultdict(list)
    for name, kind, about in support():
        rows[kind].append((name, about))
    counts = {kind: len(rows[kind]) for kind in ("native", "generic", "unsupported")}
    parts = [INTRODUCTION.format(verdicts=VERDICTS.relative_to(ROOT)), SUMMARY.format(**counts)]
    parts.append(_table("Native", ("architecture", "file"), [(name, f"`{about}`") for name, about in rows["native"]]))
    parts.append("## Generic\n\n" + ", ".join(name for name, _ in rows["generic"]) + ".")
    parts.append(_table("Unsupported", ("architecture", "reason"), rows["unsupported"]))
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _table(title: str, head: tuple[str, str], rows: list[tuple[str, str]]) -> str:
    lines = [f"| {first} | {second.replace('|', '/')} |" for first, second in rows]
    return "\n".join([f"## {title}", "", f"| {head[0]} | {head[1]} |", "|---|---|", *lines])


def complaint() -> str | None:
    """None if the page is current."""
    if PATH.exists() and PATH.read_text(encoding="utf-8") == render():
        return None
    return f"{PATH.relative_to(ROOT)} is out of date: run python -m tools.models_doc"


if __name__ == "__main__":
    PATH.write_text(render(), encoding="utf-8")
