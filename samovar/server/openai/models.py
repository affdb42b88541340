"""GET /v1/models and /v1/models/{id}: the names this server answers to."""

from __future__ import annotations

import msgspec

from samovar.server.exchange import Exchange
from samovar.server.openai.schema import ModelCard, ModelList
from samovar.server.state import ServingState


def _card(state: ServingState, name: str) -> ModelCard:
    info = state.client.info
    return ModelCard(id=name, created=state.created, root=info.model, max_model_len=info.max_model_len)


async def list_models(state: ServingState, exchange: Exchange) -> None:
    """List every served name."""
    state.require_loaded()
    cards = [_card(state, name) for name in state.names]
    await exchange.reply(200, msgspec.json.encode(ModelList(data=cards)))


async def show_model(state: ServingState, exchange: Exchange) -> None:
    """Show one served name; 404 for any other."""
    state.require_loaded()
    client_name = exchange.scope["path_params"]["model"]
    reported = state.check_model(client_name)
    name = client_name if client_name in state.names else reported
    await exchange.reply(200, msgspec.json.encode(_card(state, name)))
