"""The endpoints of the Messages API."""

from __future__ import annotations

from samovar.server.anthropic.messages import count_tokens, create_message
from samovar.server.anthropic.schema import AnswerMessage, CountTokensRequest, MessagesRequest, StreamEvent, TokenCount
from samovar.server.routing import Route

ROUTES: tuple[Route, ...] = (
    Route(
        path="/v1/messages", method="POST", summary="Answer a conversation, in Anthropic's form.", call=create_message,
        body=MessagesRequest, answer=AnswerMessage, chunk=StreamEvent,
    ),
    Route(
        path="/v1/messages/count_tokens", method="POST", summary="Count the tokens of a prompt in Anthropic's form.",
        call=count_tokens, body=CountTokensRequest, answer=TokenCount,
    ),
)  # fmt: skip
