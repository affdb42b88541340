"""Products with packed weights of four bits: every code and scale, programs of PTX, odd sizes, splits, gates, workspaces."""

from __future__ import annotations

import struct
from typing import Any

import pytest
import torch

from samovar.kernels.coded_linear import coded_linear, random_weight, tiles
from samovar.kernels.coded_linear import triton as coded
from samovar.kernels.coded_linear.tiles import choose_tile, dot_tile, fixed_tile, shared_bytes
from samovar.kernels.coded_weights import (
    KINDS,
    decode,
    pack_codes,
    pack_scale,
    pack_small_scale,
    small_scale,
    unpack_codes,
)
from samovar.kernels.coded_weights.triton import PROGRAMS, dequantize, descale
from samovar.kernels.linear.tiles import DotTile
from samovar.kernels.op import OPS, Target, compare, load_ops
from samovar.kernels.triton_launch import SHARED_BYTES, noting
from samovar.quant.numbers.small_floats import decode_e2m1, decode_e4m3
from tests.kernels.triton import ptx

load_ops("cuda")
NAMES = ("coded_linear", "coded_linear_add", "coded_gated_linear")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("kind", KINDS)
def test_packing_is_undone(kind: str) -> None:
    """Also of sizes that fill no brick; what is added is zeros."""
    made = KINDS[kind]
    codes = torch.randint(0, len(made.values), (40, 80), dtype=torch.uint8)
    found = unpack_codes(pack_codes(codes, kind), kind)
    assert found.shape == (48, 80 + 256 // made.bits - 80 % made.brick) and torch.equal(found[:40, :80], codes)
    added = torch.cat((found[40:].flatten(), found[:, 80:].flatten()))
    assert bool((torch.tensor(made.values)[added.int()] == 0).all())


def every_e2m1() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes, scale, weight) of every code with every positive E4M3 scale: rows are scales."""
    codes = (torch.arange(64) % 16).to(torch.uint8).expand(128, 64).contiguous()
    scale = torch.arange(128, dtype=torch.uint8).clamp(1, 126)[:, None].expand(128, 4).contiguous()
    weight = decode_e2m1(codes) * decode_e4m3(scale).repeat_interleave(16, 1)
    return codes, scale.view(torch.float8_e4m3fn), weight


def test_every_code_times_every_scale_is_exact() -> None:
    """The reference, and the kernels that decode in bfloat16."""
    codes, scale, weight = every_e2m1()
    packed = pack_codes(codes, "e2m1_16"), pack_small_scale(small_scale(scale)), torch.ones(128), "e2m1_16"
    assert torch.equal(decode(*packed[:2], "e2m1_16", 128, 64, packed[2]), weight)
    assert torch.equal(dequantize(*packed, torch.empty(128, 64)), weight)
    x = torch.eye(64, dtype=torch.bfloat16)
    for tile in (DotTile(16, 64, 64), DotTile(64, 128, 64)):
        assert torch.equal(coded.multiply(tile, x, packed, x.new_empty(64, 128)).t().float(), weight)


def test_a_scale_that_is_no_number_stays_so() -> None:
    scale = torch.tensor([[0x7F]], dtype=torch.uint8).view(torch.float8_e4m3fn)
    packed = pack_codes(torch.ones(16, 16, dtype=torch.uint8), "e2m1_16"), pack_small_scale(small_scale(scale))
    assert dequantize(*packed, torch.ones(1), "e2m1_16", torch.empty(1, 16)).isnan().all()


def words_of_a_lane(weight: tuple[Any, ...], lane: int, high: int) -> list[int]:
    """What `PROGRAMS` are given for the first brick: two words, and each of the row's scale words twice."""
    codes, scale, _, kind = weight
    words = codes[0, 0].view(32, 2, 2)[lane, high].tolist()
    own = scale[0, 0].view(KINDS[kind].words, 8, 2)[:, lane // 4, high].tolist()
    return [*words, *(word for each in own for word in (each, each))]


@pytest.mark.parametrize("kind", KINDS)
def test_programs_for_threads_give_what_the_reference_does(kind: str) -> None:
    """Every lane of a brick: output 2j + h holds inputs 16j + 8h + 2t and the next, of row 8 * high + g."""
    for _ in range(4):
        weight = random_weight(16, 64, kind)
        expected = decode(*weight[:2], kind, 16, 64, torch.ones(16)) / descale(kind)
        for lane in range(32):
            for high in (0, 1):
                count = 32 // KINDS[kind].bits
                outputs = ptx.run(PROGRAMS[kind], count, words_of_a_lane(weight, lane, high))
                row = expected[8 * high + lane // 4, : KINDS[kind].brick]
                got = torch.tensor([[ptx.number(word), ptx.number(word >> 16)] for word in outputs])
                pairs = row.view(-1, 2, 4, 2)[:, :, lane % 4].reshape(count, 2)
                assert torch.equal(got, pairs.to(torch.bfloat16).float()), (lane, high)


def test_programs_know_every_code_and_scale() -> None:
    """E2M1 with every E4M3 scale, through the program itself."""
    codes, scale, weight = every_e2m1()
    packed = pack_codes(codes, "e2m1_16"), pack_small_scale(small_scale(scale)), torch.ones(128), "e2m1_16"
    for brick in range(8):
        one = tuple(tensor[brick : brick + 1] for tensor in packed[:2])
        for lane in range(0, 32, 3):
            outputs = ptx.run(PROGRAMS["e2m1_16"], 8, words_of_a_lane((*one, None, "e2m1_16"), lane, 0))
            row = weight[16 * brick + lane // 4].view(4, 2, 4, 2)[:, :, lane % 4].reshape(8, 2)
            got = [[ptx.number(word) * 256, ptx.number(word >> 16) * 256] for word in outputs]
            assert got == row.tolist()


def test_the_little_machine_for_ptx() -> None:
    """Its byte permutation, three-operand logic and rounding, by hand."""
    assert ptx.run("{ prmt.b32 $0, $1, $2, 0x7610; }", 1, [0x33221100, 0x77665544]) == [0x77661100]
    assert ptx.run("{ prmt.b32 $0, $1, 0, 0x888B; }", 1, [0x80000001]) == [0x000000FF]
    assert ptx.run("{ lop3.b32 $0, $1, 0x0F, $2, 0xEA; }", 1, [0xABCD, 0x4300]) == [0x430D]
    one, third = (struct.unpack("<I", struct.pack("<f", v))[0] >> 16 for v in (1.0, 1 / 3))
    assert ptx.run("{ fma.rn.bf16x2 $0, $1, $2, $3; }", 1, [one, third, one])[0] & 0xFFFF == 0x3FAA  # a tie


@pytest.mark.parametrize(("impl", "dtype"), [("triton", torch.bfloat16), ("triton_fixed", torch.float16)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_each_op_matches_its_reference(name: str, impl: str, dtype: torch.dtype) -> None:
    op = OPS[name]
    assert op.make_examples is not None
    for example in op.make_examples():
        assert compare(op, op.impls[impl].function, example, dtype, "cpu") is None


TILES = [
    (1, DotTile(16, 64, 64)),
    (3, DotTile(16, 16, 256)),
    (19, DotTile(16, 32, 128)),
    (33, DotTile(32, 128, 64)),
    (3, DotTile(16, 64, 64, splits=2)),
    (21, DotTile(16, 32, 128, splits=4, ahead=2)),
]


@pytest.mark.parametrize(("tokens", "tile"), TILES)
def test_tiles_splits_and_what_follows(tokens: int, tile: DotTile) -> None:
    """Bias, residual and gate, at inputs that end within a tile and within a brick; nothing beyond is touched."""
    for inputs, rows in ((352, 48),) if tile.splits > 1 else ((200, 48),):
        weight = random_weight(2 * rows, inputs, "e2m1_16")
        x, bias, base = (
            torch.randn(tokens, inputs).half(),
            torch.randn(2 * rows).half(),
            torch.randn(tokens, rows).half(),
        )
        full = x.double() @ decode(*weight[:2], weight[3], 2 * rows, inputs, weight[2].double()).t() + bias.double()
        room = torch.full((tokens + 2, 2 * rows), 7.0).half()
        y = coded.multiply(tile, x, weight, room[1:-1], bias=bias)
        assert bool(((y.double() - full).abs() < 4e-3 + 2e-3 * full.abs()).all())
        assert bool((room[0] == 7).all() and (room[-1] == 7).all())
        gated = torch.nn.functional.silu(full[:, :rows]) * full[:, rows:] + base.double()
        got = coded.multiply(tile, x, weight, base, bias=bias, residual=base, gate="silu").double()
        assert bool(((got - gated).abs() < 6e-3 + 4e-3 * gated.abs()).all())


def test_workspaces_cut_a_weight() -> None:
    """cuBLAS's way, some rows at a time, alone and added."""
    weight = random_weight(300, 128, "e2m1_16")
    x, bias, base = torch.randn(5, 128).half(), torch.randn(300).half(), torch.randn(5, 300).half()
    expected = coded_linear(x, *weight, bias)
    for size in (1, 128 * 2 * 128, 1 << 20):
        got = coded.multiply_decoded(x, weight, None, bias, most_bytes=size)
        assert torch.allclose(got.float(), expected.float(), atol=4e-3, rtol=2e-3)
        added = coded.multiply_decoded(x, weight, base.clone(), bias, adds=True, most_bytes=size)
        assert torch.allclose(added.float(), (base + expected).float(), atol=8e-3, rtol=4e-3)


def test_unusable_requests_are_errors() -> None:
    weight, x = random_weight(40, 64, "e2m1_16"), torch.randn(1, 64).half()
    with pytest.raises(ValueError, match="make it contiguous"):
        coded.multiply(fixed_tile(), x, weight, x.new_empty(1, 80)[:, ::2])
    with pytest.raises(ValueError, match="cuts a brick of 16"):
        coded.multiply(fixed_tile(), x, weight, x.new_empty(1, 20), gate="silu")
    with pytest.raises(ValueError, match="do not hold 40 rows of 128"):
        dequantize(*weight, torch.empty(40, 128))
    with pytest.raises(ValueError, match="begins at a multiple of 16"):
        dequantize(*weight, torch.empty(8, 64), 8)
    with pytest.raises(ValueError, match="cuts bricks of 64"):
        coded.multiply(DotTile(16, 64, 32), x, weight, x.new_empty(1, 40))


def test_targets() -> None:
    """Chips with bfloat16, activations of 16 bits."""
    assert "sm_80" in str(coded.accepts(Target("cuda", "sm_75", torch.float16)))
    assert "16 bits" in str(coded.accepts(Target("cuda", "sm_90", torch.float32)))
    assert coded.accepts(Target("cuda", "sm_121", torch.bfloat16)) is None
    assert coded.accepts(Target("cuda", "sm_90", torch.bfloat16, deterministic=True)) is not None
    assert coded.accepts_fixed(Target("cuda", "sm_90", torch.bfloat16, deterministic=True)) is None


def test_tiles_fit_and_fill_the_chip() -> None:
    """At the sizes of a Llama 8B every choice fits; chips with less memory leave to cuBLAS what does not."""
    for n, k, parts in ((6144, 4096, 1), (4096, 4096, 1), (14336, 4096, 2), (4096, 14336, 1)):
        for tokens in range(1, tiles.MOST_TOKENS[parts] + 1):
            tile = dot_tile(tokens, n, k, parts)
            if tile is None:
                assert parts == 2 and 32 < tokens <= 64
                continue
            assert min(tokens, 128) <= tile.tokens and tile.depth % 64 == 0
            assert -(-n // tile.rows) * tile.splits >= 112
            for shared in SHARED_BYTES.values():
                chosen = choose_tile(tokens, n, k, parts, shared)
                assert chosen is None or (chosen == tile and shared_bytes(tile, parts) <= shared)
        assert choose_tile(1, n, k, parts, SHARED_BYTES[90]) is not None
    assert choose_tile(0, 4096, 4096, 1, SHARED_BYTES[90]) is None
    assert choose_tile(tiles.MOST_TOKENS[1] + 1, 4096, 4096, 1, SHARED_BYTES[90]) is None
    assert choose_tile(1, 24, 4096, 2, SHARED_BYTES[90]) is None and choose_tile(1, 64, 100, 1, 1 << 20) is None


def test_noting_needs_no_memory() -> None:
    """Every kernel can be named by tensors without memory."""
    codes, scale, row_scale, kind = random_weight(64, 128, "e2m1_32")
    weight = codes.to("meta"), scale.to("meta"), row_scale.to("meta"), kind
    with noting() as notes:
        for tokens in (1, 300):
            coded.coded_linear_triton(torch.empty(tokens, 128, dtype=torch.float16, device="meta"), *weight)
    assert {launch.name for launch in notes.launches.values()} == {"coded_kernel", "dequantize_kernel"}


def test_scales_that_are_not_small() -> None:
    """Groups of 32 and 64 inputs keep bfloat16 scales and zero points."""
    for kind in ("int4_32_zero", "int4_64_zero"):
        group = KINDS[kind].group
        codes, scale = torch.randint(0, 16, (20, 128), dtype=torch.uint8), torch.rand(20, 128 // group)
        zero = torch.randint(0, 17, scale.shape)
        kept = scale.to(torch.bfloat16).float().repeat_interleave(group, 1)
        weight = (codes.float() - zero.repeat_interleave(group, 1)) * kept
        found = decode(pack_codes(codes, kind), pack_scale(scale, kind, zero), kind, 20, 128, torch.ones(20))
        assert torch.equal(found, weight)
