"""Dialogues of any chat-like API -> requests for the engine: off the event loop where it may take long, with what the
caller's key decides, and with fields named as the caller spelled them in every refusal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from samovar.errors import ValidationError
from samovar.server.exchange import Exchange
from samovar.server.keys import routing_of
from samovar.server.state import ServingState
from samovar.text.answering import needs_grammar
from samovar.text.dialogue import Dialogue, PreparedDialogue

T = TypeVar("T")


async def prepare_dialogue(
    state: ServingState,
    exchange: Exchange,
    dialogue: Dialogue,
    values: Mapping[str, Any],
    *,
    size: int,
    spelling: Mapping[str, str] | None = None,
    **routing: Any,
) -> PreparedDialogue:
    """`Preparer.from_dialogue` for one call.

    `size` is how much text there is, roughly (the body's length). `spelling` maps our names of fields to the caller's.
    `routing` takes `max_tokens`, `priority` and `cache_salt` as the body asks (None: not said), and truncation.
    """
    preparer = state.preparer
    asked = routing_of(
        exchange.scope, priority=routing.pop("priority", None), cache_salt=routing.pop("cache_salt", None)
    )

    def work() -> PreparedDialogue:
        return preparer.from_dialogue(dialogue, values, **asked, **routing)

    return await state.offload(
        size,
        lambda: spelled(work, spelling or {}),
        is_foreign=dialogue.chat_template is not None,
        waits=needs_grammar(dialogue) or values.get("structured_outputs") is not None,
    )


def spelled(work: Callable[[], T], names: Mapping[str, str]) -> T:
    """Run `work`; a refusal names fields, and what is in them, as the caller spelled them: by the longest name that fits."""
    try:
        return work()
    except ValidationError as error:
        ours = error.parameter or ""
        known = [name for name in names if ours == name or ours.startswith((name + ".", name + "["))]
        top = max(known, key=len, default="")
        theirs = names.get(top, top)
        if theirs == top:
            raise
        message = str(error)
        if message.startswith(top):
            message = theirs + message[len(top) :]
        raise type(error)(message, parameter=theirs + ours[len(top) :], value=error.value) from None
