"""The routes of OpenAI's chat and completions, and of what goes with them."""

from __future__ import annotations

from samovar.server.openai import schema
from samovar.server.openai.chat import create_chat_completion
from samovar.server.openai.completions import create_completion
from samovar.server.openai.models import list_models, show_model
from samovar.server.openai.tokenize import detokenize, tokenize
from samovar.server.routing import Route

ROUTES: tuple[Route, ...] = (
    Route(
        path="/v1/chat/completions", method="POST", summary="Answer a conversation.", call=create_chat_completion,
        body=schema.ChatCompletionRequest, answer=schema.ChatCompletion, chunk=schema.ChatCompletionChunk,
    ),
    Route(
        path="/v1/completions", method="POST", summary="Continue one or many prompts.", call=create_completion,
        body=schema.CompletionRequest, answer=schema.Completion, chunk=schema.Completion,
    ),
    Route(path="/v1/models", summary="List the served names.", look=list_models, answer=schema.ModelList),
    Route(
        path="/v1/models/{model}", summary="Show one served name.", look=show_model, answer=schema.ModelCard,
        takes_rest=True,
    ),
    Route(
        path="/tokenize", method="POST", summary="Turn a prompt or messages into token ids.", call=tokenize,
        body=schema.TokenizeRequest, answer=schema.TokenizeResponse,
    ),
    Route(
        path="/detokenize", method="POST", summary="Turn token ids into text.", call=detokenize,
        body=schema.DetokenizeRequest, answer=schema.DetokenizeResponse,
    ),
)  # fmt: skip
