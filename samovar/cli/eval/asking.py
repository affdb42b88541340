"""Questions to a loaded model, answered greedily: in its chat template, or as plain text where it has none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from samovar.cli.eval.report import interval
from samovar.cli.eval.statistics import mcnemar, wilson
from samovar.cli.output import table
from samovar.config.field import Group, field
from samovar.errors import ConfigError

if TYPE_CHECKING:
    from samovar.engine.llm import LLM


class AskingOptions(Group):
    """How it is asked."""

    style: str = field(default="auto", choices=("auto", "chat", "plain"))
    """chat: in the model's chat template; plain: as a text to be continued; auto: chat if there is a template."""


def is_chat(llm: LLM, options: AskingOptions) -> bool:
    """Whether to ask in the chat template. Raises `ConfigError` if that was asked for and there is none."""
    from samovar.text.chat_template import load_chat_template

    if options.style == "plain":
        return False
    has_template = load_chat_template(llm.description) is not None
    if options.style == "chat" and not has_template:
        raise ConfigError("--style chat: this model has no chat template; use --style plain")
    return has_template


def answers(llm: LLM, prompts: Sequence[str], *, chat: bool, max_tokens: int, stop: Sequence[str] = ()) -> list[str]:
    """The likeliest answer to each prompt: a message of a user, or the beginning of a text. `stop` ends plain ones."""
    from samovar.core.sampling_params import SamplingParams

    if chat:
        params = SamplingParams(temperature=0, max_tokens=max_tokens)
        outputs = llm.chat([[{"role": "user", "content": prompt}] for prompt in prompts], params, use_tqdm=True)
    else:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, stop=list(stop))
        outputs = llm.generate(list(prompts), params, use_tqdm=True)
    return [output.outputs[0].text for output in outputs]


def share(hits: Sequence[bool]) -> dict[str, Any]:
    """Right answers, as a number and a share with Wilson's interval."""
    return {
        "right": sum(hits),
        "asked": len(hits),
        "share": sum(hits) / len(hits) if hits else 0.0,
        "interval": wilson(sum(hits), len(hits)),
    }


def paired(first: Sequence[bool], second: Sequence[bool]) -> dict[str, Any]:
    """McNemar's comparison of two models that were asked the same."""
    only_first, only_second, chance = mcnemar(first, second)
    return {"only_first": only_first, "only_second": only_second, "p_value": chance}


def report(names: Sequence[str], results: Sequence[dict[str, Any]], comparison: dict[str, Any] | None) -> str:
    """Shares of one model or two, for people."""
    rows = [["model", "right", "share", "95 % interval"]]
    for name, result in zip(names, results, strict=True):
        low, high = result["interval"]
        rows.append(
            [
                name,
                f"{result['right']} of {result['asked']}",
                f"{100 * result['share']:.1f} %",
                interval((100 * low, 100 * high), ".1f"),
            ]
        )
    text = table(rows, right=(1, 2, 3), indent="")
    if comparison is None:
        return text
    return text + (
        f"\nright only in the first {comparison['only_first']}, only in the second {comparison['only_second']}; "
        f"equal models differ as much with a chance of {comparison['p_value']:.3f} (McNemar)"
    )
