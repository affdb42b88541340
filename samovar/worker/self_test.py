"""The self-test of a start: each kind and shape of quantized weights is multiplied once and compared, before it serves.

A kernel that is wrong is left out and a line says so: for those numbers of tokens, or for its op as a whole.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch
from torch import nn

from samovar.errors import ConfigError
from samovar.kernels.op import OPS, Kernels, in_one_line
from samovar.layers.linear import Linear, RowLinear
from samovar.layers.mlp import GatedMLP
from samovar.quant.base import QuantMethod
from samovar.quant.checks import TOKENS, Check, Use

logger = logging.getLogger(__name__)


def checks_of(model: nn.Module) -> Iterator[Check]:
    """One check of each kind and shape, with the weights of the first layer that has it."""
    seen, gated = set[object](), _gated(model)
    for layer in model.modules():
        quant = vars(layer).get("quant")
        if not isinstance(layer, Linear) or not isinstance(quant, QuantMethod) or not layer.weights:
            continue
        use: Use = "added" if isinstance(layer, RowLinear) else gated.get(id(layer), "normed")
        for check in quant.checks(layer.weights, use):
            if check.key not in seen:
                seen.add(check.key)
                yield check


def _gated(model: nn.Module) -> dict[int, Use]:
    """The linears that are multiplied with their activation, by identity."""
    mlps = (module for module in model.modules() if isinstance(module, GatedMLP))
    return {id(mlp.gate_up_proj): mlp.activation.kind for mlp in mlps}


@torch.inference_mode()
def note_checks(model: nn.Module, dtype: torch.dtype) -> None:
    """Run the products without memory: inside `noting` that notes their launches."""
    for check in checks_of(model):
        for tokens in TOKENS:
            check.run(torch.empty(tokens, check.num_inputs, dtype=dtype, device="meta"))


class SelfTest:
    """The test of one worker, and what it found."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        """Kernels that are left out, and why."""

    @torch.inference_mode()
    def refuses(self, model: nn.Module, kernels: Kernels) -> bool:
        """Compare the products of a loaded `model` with their references, and leave out what is wrong.

        True if that was an op as a whole: the model must then be bound and filled again, and tested again. Raises
        `ConfigError` where there is no other way to multiply.
        """
        found = list(self.lines)
        for check in checks_of(model):
            if (wrong := self._wrong(check, kernels)) is None:
                continue
            route = kernels.routes.get(check.op)
            if route is None or route.chosen == "reference":
                raise ConfigError(f"self-test: {check} is wrong on this machine {wrong}: use --dtype float32")
            self.lines.append(f"self-test: {check.op} is not done by {route.chosen}: {check} is wrong {wrong}")
            _choose_again(check.op, route.chosen, wrong, kernels)
            break
        for line in self.lines[len(found) :]:
            logger.warning("%s", line)
        return any("is not done by" in line for line in self.lines[len(found) :])

    def _wrong(self, check: Check, kernels: Kernels) -> str | None:
        """Leave out what is wrong of a check's kernels; what is wrong with all of them, or None."""
        x = check.inputs(max(TOKENS), kernels.device).to(kernels.target.dtype)
        for tokens in TOKENS:
            wrong = _difference(check, x[:tokens])
            if wrong is not None and check.refuse(tokens):
                self.lines.append(
                    f"self-test: {check} is decoded first at {tokens} tokens, for its kernel is wrong: {wrong}"
                )
                wrong = _difference(check, x[:tokens])
            if wrong is not None:
                return f"at {tokens} tokens ({wrong})"
        return None


def _choose_again(name: str, chosen: str, reason: str, kernels: Kernels) -> None:
    kernels.refuse(name, chosen, f"wrong {reason}")
    kernels.use(OPS[name])


def _difference(check: Check, x: torch.Tensor) -> str | None:
    try:
        return check.difference(x)
    # A boundary: whatever a kernel raises means that it cannot be used, and is reported.
    except Exception as error:
        return f"does not run: {in_one_line(error)}"
