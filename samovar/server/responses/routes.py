"""The routes of the Responses API."""

from __future__ import annotations

from samovar.server.responses import schema
from samovar.server.responses.create import count_input_tokens, create_response
from samovar.server.responses.stored import cancel_response, delete_response, list_input_items, show_response
from samovar.server.routing import Route

_ONE = "/v1/responses/{response_id}"

ROUTES: tuple[Route, ...] = (
    Route(
        path="/v1/responses", method="POST", summary="Answer a conversation of items.", call=create_response,
        body=schema.ResponseRequest, answer=schema.ResponseObject, chunk=schema.ResponseEvent,
    ),
    Route(
        path="/v1/responses/input_tokens", method="POST", summary="Count the tokens of a request's prompt.",
        call=count_input_tokens, body=schema.ResponseRequest, answer=schema.ResponseInputTokens,
    ),
    Route(
        path=_ONE, summary="Fetch a stored response, or follow one that runs in the background.", look=show_response,
        query=schema.RetrieveQuery, answer=schema.ResponseObject, chunk=schema.ResponseEvent,
    ),
    Route(path=_ONE, method="DELETE", summary="Forget a response.", look=delete_response, answer=schema.ResponseDeleted),
    Route(
        path=_ONE + "/cancel", method="POST", summary="Stop a response that runs in the background.",
        look=cancel_response, answer=schema.ResponseObject,
    ),
    Route(
        path=_ONE + "/input_items", summary="List what a response was generated from.", look=list_input_items,
        query=schema.ItemsQuery, answer=schema.ResponseItems,
    ),
)  # fmt: skip
