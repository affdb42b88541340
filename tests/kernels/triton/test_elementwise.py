"""Norms, activations, rotary embedding, the K/V write and the inputs of a decode step in Triton, against references."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from samovar.kernels.op import OPS, Op, compare, load_ops
from samovar.kernels.triton_launch import Launch, noting

NAMES = (
    "rms_norm",
    "add_rms_norm",
    "silu_mul",
    "gelu_mul",
    "rope",
    "write_kv",
    "rope_write_kv",
    "write_latent",
    "rope_table",
    "decode_inputs",
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TRUNCATES = DEVICE == "cpu"
"""Triton's interpreter cuts float32 down to bfloat16 where a GPU rounds to nearest."""
load_ops("cuda")


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Same random numbers for all, and new tensors that hold NaN until somebody writes them."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def triton(name: str) -> Callable[..., Any]:
    """The Triton implementation of an op."""
    function: Callable[..., Any] = OPS[name].impls["triton"].function
    return function


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal numbers on the device of the tests, drawn alike for every device."""
    return torch.randn(shape).to(DEVICE, dtype)


def check(name: str, *arguments: Any) -> Any:
    """Run the Triton implementation and the reference on equal arguments of any dtype or strides; returns the former."""
    op: Op[..., Any] = OPS[name]
    copies = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
    expected, got = op.reference(*copies), triton(name)(*arguments)
    pairs = list(zip(expected, got, strict=True)) if isinstance(got, tuple) else [(expected, got)] * (got is not None)
    names = op.reference.__code__.co_varnames
    places = [place for place in map(names.index, op.mutates) if place < len(arguments)]  # others were left out
    pairs += [(copies[place], arguments[place]) for place in places]
    dtype = next(a.dtype for a in arguments if isinstance(a, torch.Tensor))
    absolute, relative = op.tolerance_of(dtype if dtype in op.tolerance else torch.float32)
    for wanted, given in pairs:
        assert (wanted.shape, wanted.dtype) == (given.shape, given.dtype)
        torch.testing.assert_close(given, wanted, atol=absolute, rtol=relative)
    return got


def check_copied(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """`got` equals `wanted` converted to its dtype."""
    wanted = wanted.to(got.dtype)
    ulp = torch.finfo(got.dtype).eps if TRUNCATES and got.dtype == torch.bfloat16 else 0.0
    torch.testing.assert_close(got, wanted, atol=0.0, rtol=ulp)


def rotary(tokens: int, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """cos, sin as `rope` takes them."""
    angle = torch.rand(tokens, 1, dim // 2) * 6
    cos, sin = torch.cat((angle.cos(),) * 2, -1), torch.cat((-angle.sin(), angle.sin()), -1)
    return cos.to(DEVICE, dtype), sin.to(DEVICE, dtype)


def head_major(blocks: int, block_size: int, heads: int, dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Two caches [blocks, block_size, heads, dim] whose memory has heads before offsets."""
    return [randn(blocks, heads, block_size, dim, dtype=dtype).transpose(1, 2) for _ in range(2)]


def test_the_poison_works() -> None:
    assert bool(torch.empty(3).isnan().all()) and bool(randn(2).new_empty(3).isnan().all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_each_op_matches_its_reference(name: str, dtype: torch.dtype) -> None:
    op: Op[..., Any] = OPS[name]
    assert op.make_examples is not None and op.prefer[0] == "triton"
    for example in op.make_examples():
        assert compare(op, triton(name), example, dtype, DEVICE) is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weight_dtype", ["float32", "same"])
def test_rms_norm_of_odd_shapes_and_views(dtype: torch.dtype, weight_dtype: str) -> None:
    kind = torch.float32 if weight_dtype == "float32" else dtype
    for shape in ((5, 1), (2, 17), (1, 1025), (3, 2048), (4, 3, 80), (2, 3, 2, 16), (16,), (0, 8), (0, 3, 8)):
        check("rms_norm", randn(*shape, dtype=dtype), randn(shape[-1], dtype=kind), 1e-5)
    qkv = randn(5, 4 + 2 + 2, 24, dtype=dtype)
    q, k, _ = torch.split(qkv, [4, 2, 2], dim=1)
    for view in (q, k, q.flatten(1), qkv[::2, ::3], qkv.transpose(1, 2)):
        got = check("rms_norm", view, randn(view.shape[-1], dtype=kind), 1e-6)
        assert got.is_contiguous()


def test_rms_norm_counts_eps() -> None:
    assert triton("rms_norm")(torch.zeros(2, 8, device=DEVICE), torch.ones(8, device=DEVICE), 1e-6).eq(0).all()
    tiny = torch.full((1, 8), 1e-3, device=DEVICE)
    torch.testing.assert_close(triton("rms_norm")(tiny, torch.ones(8, device=DEVICE), 3e-6), tiny * 500)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_add_rms_norm_keeps_the_rounded_sum(dtype: torch.dtype) -> None:
    for tokens, dim in ((2, 1), (3, 17), (1, 2049), (2, 4096), (0, 8)):
        x, residual = randn(tokens, dim, dtype=dtype), randn(tokens, dim, dtype=dtype)
        for weight in (randn(dim, dtype=dtype), randn(dim)):
            _, total = check("add_rms_norm", x, residual, weight, 1e-6)
            check_copied(total, x + residual)
    wide, other = randn(4, 3 * 32, dtype=dtype), randn(8, 32, dtype=dtype)
    check("add_rms_norm", wide[:, 32:64], other[::2], randn(32, dtype=dtype), 1e-6)
    check("add_rms_norm", wide[:, ::3], randn(32, 4, dtype=dtype).t(), randn(32, dtype=dtype), 1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["silu_mul", "gelu_mul"])
def test_gated_activations_of_odd_shapes_and_views(name: str, dtype: torch.dtype) -> None:
    for tokens, hidden in ((1, 1), (3, 24), (2, 1023), (1, 1025), (2, 3072), (0, 16)):
        check(name, randn(tokens, 2 * hidden, dtype=dtype))
    check(name, randn(4, 100, dtype=dtype)[::2, 10:90])
    check(name, randn(40, 6, dtype=dtype).t())


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("name", ["silu_mul", "gelu_mul"])
def test_gated_activations_of_large_numbers(name: str) -> None:
    gate = torch.tensor([[-3e38, -1e4, -100.0, 0.0, 100.0, 1e4, 3e38]], device=DEVICE)
    got = triton(name)(torch.cat((gate, torch.ones_like(gate)), 1))
    torch.testing.assert_close(got, gate.clamp(min=0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rope_of_views_into_a_joint_projection(dtype: torch.dtype) -> None:
    for tokens, heads, kv_heads, dim, turned in ((3, 9, 3, 64, 64), (5, 4, 1, 80, 32), (2, 2, 2, 256, 64)):
        qkv = randn(tokens, heads + 2 * kv_heads, dim, dtype=dtype)
        q, k, _ = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
        got = check("rope", q, k, *rotary(tokens, turned, dtype))
        assert all(x.is_contiguous() for x in got)
        assert torch.equal(got[0][..., turned:], q[..., turned:])


@pytest.mark.parametrize("cache_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_write_kv_converts_and_leaves_other_slots_alone(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    qkv = randn(6, 4 + 3 + 3, 20, dtype=dtype)
    k, v = qkv[:, 4:7], qkv[:, 7:]
    slots = torch.tensor([7, -1, 0, 23, -5, 8], device=DEVICE)
    kept, written = [0, 2, 3, 5], (torch.tensor([1, 0, 5, 2]), torch.tensor([3, 0, 3, 0]))
    for caches in (head_major(6, 4, 3, 20, cache_dtype), [randn(6, 4, 3, 20, dtype=cache_dtype) for _ in "kv"]):
        expected = [cache.clone() for cache in caches]
        triton("write_kv")(k, v, *caches, slots)
        for cache, rows, wanted in zip(caches, (k, v), expected):
            check_copied(cache[written], rows[kept])
            wanted[written] = cache[written]
            assert torch.equal(cache, wanted)


@pytest.mark.skipif(DEVICE != "cpu", reason="reserves memory that only a CPU need not have")
def test_a_cache_of_more_than_two_to_the_31_elements_is_addressed() -> None:
    """Pages that nobody touches cost nothing: two are."""
    size = (1 << 32) + (1 << 16)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    keys = torch.frombuffer(memory, dtype=torch.float16).view(-1, 2, 4, 8).transpose(1, 2)
    k, v, slot = randn(1, 2, 8), randn(1, 2, 8), (1 << 31) // 16 + 9
    triton("write_kv")(k, v, keys, keys, torch.tensor([slot]))
    assert torch.equal(keys[slot // 4, slot % 4], v[0].half())
    given = [randn(1, 6, 8), *rotary(1, 8, torch.float32), keys, keys, torch.tensor([slot]), None, None, 1e-6, 2]
    triton("rope_write_kv")(*given)
    assert torch.equal(keys[slot // 4, slot % 4], given[0][0, 4:].half())


def fused(tokens: int, shape: tuple[int, int, int], turned: int, dtype: torch.dtype) -> list[Any]:
    """Arguments of `rope_write_kv` without norms; shape = (heads, kv_heads, head_dim)."""
    heads, kv_heads, dim = shape
    slots = torch.randperm(40)[:tokens].to(DEVICE)
    qkv = randn(tokens, heads + 2 * kv_heads, dim, dtype=dtype)
    caches = head_major(10, 4, kv_heads, dim, dtype)
    return [qkv, *rotary(tokens, turned, dtype), *caches, slots, None, None, 1e-6, heads]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("shape", "turned"),
    [
        ((9, 3, 64), 64), ((5, 5, 80), 80), ((4, 2, 96), 96), ((32, 8, 128), 128), ((4, 1, 256), 256), ((3, 1, 80), 32),
        ((2, 2, 128), 64), ((1, 1, 256), 64), ((2, 1, 20), 8), ((2, 1, 6), 2),
    ],
    ids=str,
)  # fmt: skip
def test_rope_write_kv_of_every_head(shape: tuple[int, int, int], turned: int, dtype: torch.dtype) -> None:
    given = fused(3, shape, turned, dtype)
    q = check("rope_write_kv", *given)
    assert q.is_contiguous()
    given[6:8] = randn(shape[2], dtype=dtype), randn(shape[2])
    given[5] = torch.tensor([-1, 5, 39], device=DEVICE)
    check("rope_write_kv", *given)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rope_write_kv_equals_the_ops_it_joins(dtype: torch.dtype) -> None:
    """To the last bit: joining ops changes no rounding."""
    given = fused(4, (6, 2, 64), 32, dtype)
    apart = [a.clone() if isinstance(a, torch.Tensor) else a for a in given]
    q, k, v = torch.split(apart[0], [6, 2, 2], dim=1)
    q, k = triton("rope")(q, k, *apart[1:3])
    triton("write_kv")(k, v, *apart[3:6])
    assert torch.equal(triton("rope_write_kv")(*given), q)
    assert torch.equal(given[3], apart[3]) and torch.equal(given[4], apart[4])


def test_rope_write_kv_of_a_strided_projection_into_a_cache_of_another_dtype() -> None:
    given = fused(4, (4, 2, 16), 16, torch.float32)
    given[0] = randn(4, 3 * 8, 16)[:, 8:16]
    given[3:5] = [cache.bfloat16() for cache in given[3:5]]
    given[6] = randn(16)
    q, keys, values = (
        OPS["rope_write_kv"].reference(*[*given[:3], *(c.clone() for c in given[3:5]), *given[5:]]),
        *given[3:5],
    )
    torch.testing.assert_close(triton("rope_write_kv")(*given), q, atol=4e-6, rtol=4e-6)
    at = given[5] // 4, given[5] % 4
    check_copied(values[at], given[0][:, 6:])
    _, k = OPS["rope"].reference(q, given[0][:, 4:6], *given[1:3])
    torch.testing.assert_close(keys[at].float(), k, atol=1e-5, rtol=torch.finfo(torch.bfloat16).eps)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rope_table_is_exact_at_every_position(dtype: torch.dtype) -> None:
    positions = torch.tensor([0, 1, 31, 4097, 131071, 999_983, 1_000_000], device=DEVICE)
    per_position = (500000.0 ** -(torch.arange(40) / 40)).to(DEVICE)
    cos, sin = triton("rope_table")(positions, per_position, 1.25, dtype)
    angle = (positions[:, None].float() * per_position).double()[:, None]
    for got, exact in ((cos, torch.cat((angle.cos(),) * 2, -1)), (sin, torch.cat((-angle.sin(), angle.sin()), -1))):
        assert got.dtype == dtype and got.shape == exact.shape
        torch.testing.assert_close(got.double(), 1.25 * exact, atol=3e-7, rtol=torch.finfo(dtype).eps)


def test_decode_inputs_of_a_hand_made_step() -> None:
    """A host token, a sampled one, a padding row, and a position that opens a block; packed is a slice of a buffer."""
    buffer = torch.full((4, 32), 1 << 30, dtype=torch.int32, device=DEVICE)
    buffer[:, :4] = torch.tensor([[2, 0, 3, 1], [5, 0, -1, 8], [70, -1, 9, -1], [0, 0, 0, 0]])
    tables = torch.tensor([[11, 12, 13], [21, 22, 23], [31, 32, 33], [-7, -7, -7]], dtype=torch.int32, device=DEVICE)
    sampled = torch.tensor([100, 101, 102, 103], device=DEVICE)
    ids, positions, slots = (torch.full((4,), -99, device=DEVICE) for _ in range(3))
    totals = torch.full((4,), -99, dtype=torch.int32, device=DEVICE)
    for run in (OPS["decode_inputs"].reference, triton("decode_inputs")):
        run(buffer[:, :4], sampled, tables, 4, ids, positions, slots, totals)
        assert ids.tolist() == [70, 100, 0, 101]
        assert positions.tolist() == [5, 0, 0, 8]
        assert slots.tolist() == [32 * 4 + 1, 11 * 4, -1, 23 * 4]
        assert totals.tolist() == [6, 1, 0, 9]
        for written in (ids, positions, slots, totals):
            written.fill_(-99)


def test_the_torch_write_equals_the_reference_in_both_orders() -> None:
    k, v = torch.randn(2, 5, 2, 8)
    for slots in (torch.tensor([3, 9, 0, 15, 7]), torch.tensor([3, -1, 0, 15, -2])):
        for keys, values in (torch.randn(2, 4, 4, 2, 8), torch.randn(2, 4, 2, 4, 8).transpose(2, 3)):
            pairs = [(keys.clone(), values.clone()) for _ in range(2)]
            OPS["write_kv"].reference(k, v, *pairs[0], slots)
            OPS["write_kv"].impls["torch_rows"].function(k, v, *pairs[1], slots)
            assert all(torch.equal(a, b) for a, b in zip(*pairs))
            assert not torch.equal(pairs[0][0], keys)


def llama_step(tokens: int) -> Iterator[tuple[str, Sequence[Any]]]:
    """Every op with the shapes of an 8-billion-parameter Llama, without memory."""
    dtype, long, heads, kv_heads, dim = torch.bfloat16, torch.int64, 32, 8, 128

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    qkv = empty(tokens, heads + 2 * kv_heads, dim)
    q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
    tables = empty(tokens, 1, dim), empty(tokens, 1, dim)
    caches = [empty(100, kv_heads, 16, dim).transpose(1, 2) for _ in range(2)]
    slots, norms = empty(tokens, dtype=long), (empty(dim), empty(dim))
    yield "rms_norm", (empty(tokens, 4096), empty(4096), 1e-5)
    yield "rms_norm", (q, norms[0], 1e-5)
    yield "add_rms_norm", (empty(tokens, 4096), empty(tokens, 4096), empty(4096), 1e-5)
    yield "silu_mul", (empty(tokens, 2 * 14336),)
    yield "gelu_mul", (empty(tokens, 2 * 14336),)
    yield "rope", (q, k, *tables)
    yield "write_kv", (k, v, *caches, slots)
    yield "rope_write_kv", (qkv, *tables, *caches, slots, *norms, 1e-5, heads)
    yield "rope_table", (slots, empty(dim // 2, dtype=torch.float32), 1.0, dtype)
    rows = (empty(tokens, dtype=long) for _ in range(3)), empty(tokens, dtype=torch.int32)
    packed, block_tables = empty(4, tokens, dtype=torch.int32), empty(257, 512, dtype=torch.int32)
    yield "decode_inputs", (packed, empty(257, dtype=long), block_tables, 16, *rows[0], rows[1])


def variant(note: Launch) -> tuple[Any, ...]:
    """What a launch is compiled by: its key, without the integers that the kernel does not specialise."""
    kernel = note.kernel
    free = kernel.kwargs["do_not_specialize"] if hasattr(kernel, "kwargs") else kernel.do_not_specialize
    parts = [part for part, name in zip(note.key()[1], kernel.arg_names) if name not in (free or ())]
    return kernel, tuple(parts), note.key()[2]


def test_ops_run_without_memory_and_one_variant_serves_every_number_of_tokens() -> None:
    variants = []
    for tokens in (1, 2, 16, 100, 8192):
        with noting() as notes:
            for name, arguments in llama_step(tokens):
                result = triton(name)(*arguments)
                for tensor in result if isinstance(result, tuple) else [] if result is None else [result]:
                    assert tensor.device.type == "meta" and tensor.shape[0] == tokens
        variants.append({variant(note) for note in notes.launches.values()})
    assert len(variants[0]) == 10 and all(found == variants[0] for found in variants)
