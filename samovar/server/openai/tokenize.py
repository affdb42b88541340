"""POST /tokenize and /detokenize: the served model's own tokenizer, with the chat template when messages are given."""

from __future__ import annotations

import msgspec

from samovar.errors import ValidationError
from samovar.server.exchange import Exchange
from samovar.server.openai import refusals
from samovar.server.openai.prompts import encode_chat, require_tokenizer
from samovar.server.openai.schema import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse
from samovar.server.parsing import decode_body
from samovar.server.state import ServingState


async def tokenize(state: ServingState, exchange: Exchange, body: bytes) -> None:
    """Text or messages -> token ids."""
    asked = decode_body(body, TokenizeRequest, refusals.NONE)
    state.require_loaded()
    state.check_model(asked.model)
    tokenizer = require_tokenizer(state, "prompt")
    if (asked.prompt is None) == (asked.messages is None):
        raise ValidationError("give either prompt or messages", parameter="prompt")
    if asked.prompt is not None:
        text, specials = asked.prompt, asked.add_special_tokens is not False
        ids = await state.offload(len(text), lambda: tokenizer.encode(text, add_special_tokens=specials))
    else:
        ids = await encode_chat(state, asked, body)
    answer = TokenizeResponse(count=len(ids), max_model_len=state.client.info.max_model_len, tokens=ids)
    if asked.return_token_strs:
        answer.token_strs = [tokenizer.token_text(token) for token in ids]
    await exchange.reply(200, msgspec.json.encode(answer))


async def detokenize(state: ServingState, exchange: Exchange, body: bytes) -> None:
    """Token ids -> text."""
    asked = decode_body(body, DetokenizeRequest, refusals.NONE)
    state.require_loaded()
    state.check_model(asked.model)
    tokenizer = require_tokenizer(state, "tokens")
    vocab_size = state.client.info.vocab_size
    for token in asked.tokens:
        if token >= vocab_size:
            message = f"tokens: {token} is outside the vocabulary of {vocab_size} tokens"
            raise ValidationError(message, parameter="tokens", value=token)
    ids = asked.tokens
    text = await state.offload(len(ids), lambda: tokenizer.decode(ids, skip_special_tokens=False))
    await exchange.reply(200, msgspec.json.encode(DetokenizeResponse(prompt=text)))
