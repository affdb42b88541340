"""`<think>` and tags like it. Models that write these often call tools without closing them."""

from __future__ import annotations

from samovar.text.formats.base import ReasoningFormat


def _format(name: str, tag: str) -> ReasoningFormat:
    opening, closing = f"<{tag}>", f"</{tag}>"
    return ReasoningFormat(
        name=name,
        opens=(opening,),
        closes=(closing,),
        template_marks=((opening,), (closing,)),
        ends_at_tools=True,
    )


THINK = _format("think", "think")
SEED = _format("seed_oss", "seed:think")
LONGCAT = _format("longcat", "longcat_think")
