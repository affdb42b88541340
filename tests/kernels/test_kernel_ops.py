"""Every op, present and future: it has examples and tolerances, and each implementation agrees with the reference."""

from __future__ import annotations

import pytest
import torch

from samovar.errors import ConfigError
from samovar.kernels.op import OPS, Impl, Kernels, Op, Target, compare, load_ops

load_ops()
PAIRS = [(op, impl) for op in OPS.values() for impl in op.impls.values()]
CPU = Target("cpu", "", torch.float32)


@pytest.mark.parametrize("op", OPS.values(), ids=list(OPS))
def test_every_op_declares_examples_tolerance_and_order(op: Op[..., object]) -> None:
    assert op.make_examples is not None, f"{op.name}: declare examples with @{op.name}.examples"
    assert len(list(op.make_examples())) >= 2
    assert op.reference.__doc__
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert op.tolerance_of(dtype)
    assert set(op.impls) <= set(op.prefer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("op", "impl"), PAIRS, ids=[f"{op.name}-{impl.name}" for op, impl in PAIRS])
def test_every_implementation_matches_the_reference(op: Op[..., object], impl: object, dtype: torch.dtype) -> None:
    assert op.make_examples is not None
    if refusal := impl.refusal(Target("cpu", "", dtype)):  # type: ignore[attr-defined]
        pytest.skip(refusal)
    for example in op.make_examples():
        assert compare(op, impl.function, example, dtype, "cpu") is None  # type: ignore[attr-defined]


@pytest.mark.parametrize("op", OPS.values(), ids=list(OPS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_references_in_16_bits_stay_near_float64(op: Op[..., object], dtype: torch.dtype) -> None:
    """The reference itself is bounded by the same tolerance around its float64 result."""
    assert op.make_examples is not None
    absolute, relative = op.tolerance_of(dtype)
    for example in op.make_examples():
        rounded = [a.to(dtype) if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in example]
        exact = [a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in rounded]
        got, expected = op.reference(*rounded), op.reference(*exact)
        for g, e in zip(got, expected, strict=True) if isinstance(got, tuple) else [(got, expected)]:
            if g is not None:
                bound = max(absolute, 1e-5) + max(relative, 1e-5) * e.double().abs()
                assert bool(((g.double() - e.double()).abs() <= bound).all())


def scale_op() -> Op[..., torch.Tensor]:
    """A made-up op outside the registry with one right, one wrong and one refusing implementation."""

    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    op: Op[..., torch.Tensor] = Op(double, prefer=("refusing", "wrong", "right"))
    op.examples(lambda: [(torch.ones(3),)])
    op.tolerance[torch.float32] = (0.0, 0.0)
    op.impl("refusing", devices=("cpu",), accepts=lambda target: "not today")(lambda x: x + x)
    op.impl("wrong", devices=("cpu",))(lambda x: x * 2.5)
    op.impl("right", devices=("cpu",))(lambda x: x + x)
    return op


def test_choice_takes_the_first_that_accepts_and_survives_the_probe() -> None:
    kernels, op = Kernels(CPU, "cpu"), scale_op()
    assert torch.equal(kernels.use(op)(torch.ones(2)), torch.full((2,), 2.0))
    route = kernels.routes["double"]
    assert route.chosen == "right" and not route.is_fallback
    assert str(route) == (
        "double: refusing: not today · wrong: differs from the reference: largest error 0.5 in torch.float32 · "
        "right: chosen · reference: always"
    )
    assert kernels.use(op) is kernels.use(op)


def test_falling_back_to_the_reference_is_visible() -> None:
    op = scale_op()
    del op.impls["right"]
    kernels = Kernels(CPU, "cpu")
    kernels.use(op)
    assert kernels.routes["double"].chosen == "reference" and kernels.routes["double"].is_fallback


def test_overrides_choose_or_are_refused_in_words() -> None:
    chosen = Kernels(CPU, "cpu", ["rms_norm=reference"])
    assert chosen.use(OPS["rms_norm"]) is OPS["rms_norm"].reference
    assert not chosen.routes["rms_norm"].is_fallback
    with pytest.raises(ConfigError, match="no op 'rms'; there are add_rms_norm"):
        Kernels(CPU, "cpu", ["rms=reference"])
    with pytest.raises(ConfigError, match="no implementation 'cutlass' here; on cpu there are torch_fused, reference$"):
        Kernels(CPU, "cpu", ["rms_norm=cutlass"])
    with pytest.raises(ConfigError, match="rms_norm=torch_fused cannot be used here: needs cpu"):
        Kernels(Target("cuda", "sm_90", torch.float32), "cpu", ["rms_norm=torch_fused"]).use(OPS["rms_norm"])


def test_no_cpu_op_falls_back() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        chosen = Kernels(Target("cpu", "", dtype), "cpu")
        for op in OPS.values():
            chosen.use(op)
        assert chosen.routes.keys() == OPS.keys()
        for route in chosen.routes.values():
            assert not route.is_fallback, str(route)


def test_a_result_of_another_type_or_written_argument_is_a_difference() -> None:
    assert "float32 instead of" in str(
        compare(OPS["silu_mul"], lambda x: OPS["silu_mul"](x).float(), (torch.randn(2, 8),), torch.bfloat16, "cpu")
    )
    example = next(iter(OPS["write_kv"].make_examples()))  # type: ignore[misc]
    assert compare(OPS["write_kv"], lambda *a: None, example, torch.float32, "cpu") is not None


def test_on_a_gpu_choices_are_verified_later() -> None:
    """Choosing runs nothing; `verify` names what differs or fails; `refuse` makes the next choice, visibly."""
    op = scale_op()
    op.impls = {name: Impl(name, impl.function, ("cuda",), impl.accepts) for name, impl in op.impls.items()}
    kernels = Kernels(Target("cuda", "sm_90", torch.float32), "cpu")
    assert float(kernels.use(op)(torch.ones(1))) == 2.5
    (refusal,) = kernels.verify()
    assert (refusal.op, refusal.impl) == ("double", "wrong") and "largest error 0.5" in refusal.reason
    kernels.refuse(refusal.op, refusal.impl, refusal.reason)
    assert float(kernels.use(op)(torch.ones(1))) == 2.0 and kernels.verify() == []
    assert "wrong: differs" in str(kernels.routes["double"]) and not kernels.routes["double"].is_fallback

    def fails(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("at 7:\n  ...\nno such instruction")

    op.impls["right"] = Impl("right", fails, ("cuda",), lambda target: None)
    kernels = Kernels(Target("cuda", "sm_90", torch.float32), "cpu", [])
    kernels.refuse("double", "wrong", "known to differ")
    kernels.use(op)
    (refusal,) = kernels.verify()
    assert refusal.reason == "does not run: RuntimeError: no such instruction"
    kernels.refuse(refusal.op, refusal.impl, refusal.reason)
    kernels.use(op)
    assert kernels.routes["double"].is_fallback and kernels.chosen() == []


def test_determinism_is_a_fact_of_the_target() -> None:
    """What an implementation accepts may depend on it."""
    op = scale_op()
    op.impl("right", devices=("cpu",), accepts=lambda target: None if target.deterministic else "slow")(lambda x: x * 2)
    del op.impls["wrong"]
    plain, fixed = Kernels(CPU, "cpu"), Kernels(Target("cpu", "", torch.float32, deterministic=True), "cpu")
    plain.use(op)
    fixed.use(op)
    assert plain.routes["double"].chosen == "reference" and fixed.routes["double"].chosen == "right"
