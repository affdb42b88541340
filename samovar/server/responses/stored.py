"""What a client may do with responses that are stored or run in the background: fetch, follow, cancel, delete."""

from __future__ import annotations

from typing import Any

import msgspec

from samovar.errors import ValidationError
from samovar.server.calls import run_call, send_stream
from samovar.server.exchange import Exchange
from samovar.server.keys import caller_of
from samovar.server.query import read_query
from samovar.server.responses.output import new_id
from samovar.server.responses.running import replay
from samovar.server.responses.schema import ItemsQuery, ResponseDeleted, ResponseItems, RetrieveQuery
from samovar.server.state import ServingState

_encode = msgspec.json.Encoder().encode


def _asked(exchange: Exchange) -> tuple[str, str]:
    """(owner, response id) of a request."""
    return caller_of(exchange.scope).name, exchange.scope["path_params"]["response_id"]


async def show_response(state: ServingState, exchange: Exchange) -> None:
    """GET /v1/responses/{response_id}: the object, or with `stream` the events of a background response."""
    owner, response_id = _asked(exchange)
    query = read_query(exchange, RetrieveQuery)
    if query.starting_after is not None and not query.stream:
        raise ValidationError("starting_after needs stream=true", parameter="starting_after")
    after = -1 if query.starting_after is None else query.starting_after
    run = state.responses.running(owner, response_id)
    if run is not None:
        if query.stream:
            stream = send_stream(state, exchange, run.follow(after), last_words=run.last_words, end=b"")
            await run_call(state, exchange, stream)
        else:
            await exchange.reply(200, _encode(run.response))
        return
    kept = state.responses.get(owner, response_id)
    if not query.stream:
        await exchange.reply(200, kept.body)
        return
    if kept.frames is None:
        message = "stream: the events of this response are not kept; only those of background responses are"
        raise ValidationError(message, parameter="stream")
    frames = replay(kept.frames, kept.first_frame, after)
    await exchange.start_stream()
    if frames:
        await exchange.write(frames)
    await exchange.end_stream(b"")


async def cancel_response(state: ServingState, exchange: Exchange) -> None:
    """POST /v1/responses/{response_id}/cancel: stop a background response; one that has ended stays as it is."""
    owner, response_id = _asked(exchange)
    run = state.responses.running(owner, response_id)
    if run is not None:
        await run.cancel()
        await exchange.reply(200, _encode(run.response))
        return
    kept = state.responses.get(owner, response_id)
    if not kept.is_background:
        message = (
            "response_id: only responses created with background: true can be cancelled; close the connection of others"
        )
        raise ValidationError(message, parameter="response_id", value=response_id)
    await exchange.reply(200, kept.body)


async def delete_response(state: ServingState, exchange: Exchange) -> None:
    """DELETE /v1/responses/{response_id}: forget it; one that runs in the background is stopped."""
    owner, response_id = _asked(exchange)
    run = state.responses.running(owner, response_id)
    if run is not None:
        await run.cancel()
    state.responses.delete(owner, response_id)
    await exchange.reply(200, _encode(ResponseDeleted(id=response_id)))


async def list_input_items(state: ServingState, exchange: Exchange) -> None:
    """GET /v1/responses/{response_id}/input_items: what the response was generated from, earlier responses included."""
    owner, response_id = _asked(exchange)
    query = read_query(exchange, ItemsQuery)
    chain = state.responses.chain(owner, response_id, "response_id")
    items: list[dict[str, Any]] = []
    for at, response in enumerate(chain):
        items += response.items()
        if at < len(chain) - 1:
            items += response.output()
    for item in items:
        item.setdefault("id", new_id("item_"))
    if query.order == "desc":
        items.reverse()
    if query.after is not None:
        places = [at for at, item in enumerate(items) if item["id"] == query.after]
        if not places:
            message = f"after: the response has no item {query.after[:100]!r}"
            raise ValidationError(message, parameter="after", value=query.after)
        items = items[places[0] + 1 :]
    page = items[: query.limit]
    answer = ResponseItems(
        data=page,
        first_id=page[0]["id"] if page else None,
        last_id=page[-1]["id"] if page else None,
        has_more=len(items) > len(page),
    )
    await exchange.reply(200, _encode(answer))
