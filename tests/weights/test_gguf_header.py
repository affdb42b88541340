"""The GGUF header reader: equal to the `gguf` package on good files, a one-line error on every bad one."""

from __future__ import annotations

import random
import resource
import struct
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samovar.config.gguf import MAX_ELEMENTS, StringArray, read_gguf_header
from samovar.errors import CheckpointError
from tests.weights.gguf_files import finish

NUM_MUTATIONS = 5000


def write_sample(path: Path, *, tokens: int = 300, tensors: int = 12) -> None:
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_uint32("llama.block_count", 3)
    writer.add_float32("llama.rope.freq_base", 1e4)
    writer.add_int64("sample.long", -5)
    writer.add_bool("sample.flag", True)
    writer.add_string("sample.text", "grüße\n")
    writer.add_array("sample.flags", [True, False, True])
    writer.add_array("sample.numbers", [1, -2, 3])
    writer.add_array("sample.floats", [0.5, 1.5])
    writer.add_token_list(["", *(f"tök{i}" for i in range(tokens - 1))])
    rng = np.random.default_rng(0)
    for i in range(tensors):
        writer.add_tensor(f"blk.{i}.ffn_up.weight", rng.standard_normal((i + 1, 32)).astype(np.float32))
    finish(writer)


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "sample.gguf"
    write_sample(path)
    return path


def same_as_package(path: Path) -> None:
    ours, theirs = read_gguf_header(path), gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert ours.metadata.keys() == fields.keys()
    for key, value in ours.metadata.items():
        assert (value if isinstance(value, (int, float, str)) else list(value)) == fields[key], key
    assert ours.alignment == theirs.alignment
    tensors = {
        t.name: (tuple(int(d) for d in reversed(t.shape)), t.tensor_type.name, t.data_offset, t.n_bytes)
        for t in theirs.tensors
    }
    assert {t.name: (t.shape, t.type.name, t.offset, t.nbytes) for t in ours.tensors.values()} == tensors


def test_equal_to_the_package(sample: Path) -> None:
    same_as_package(sample)


def test_string_array_is_a_sequence(sample: Path) -> None:
    tokens = read_gguf_header(sample).metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, StringArray)
    texts = list(tokens)
    assert len(texts) == len(tokens) == 300
    assert [tokens[i] for i in range(300)] == texts == tokens[:]
    assert tokens[-1] == texts[-1] and tokens[5:9] == texts[5:9] and tokens.raw(1) == b"t\xc3\xb6k0"
    assert [tokens.find(text) for text in texts] == list(range(300))
    assert tokens.find("tök") is None and tokens.find("ök1") is None
    with pytest.raises(IndexError):
        tokens[300]


def test_strings_across_read_windows(tmp_path: Path) -> None:
    """Entries longer than one read window, and many that straddle its end."""
    path = tmp_path / "long.gguf"
    rng = random.Random(1)
    texts = ["x" * rng.choice([0, 7, 300, 70_000, 1_500_000]) + str(i) for i in range(60)]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_array("long.texts", texts)
    writer.add_string("after", "here")
    finish(writer)
    metadata = read_gguf_header(path).metadata
    assert list(metadata["long.texts"]) == texts and metadata["after"] == "here"


def test_large_vocabulary_is_fast_and_small(tmp_path: Path) -> None:
    path = tmp_path / "vocab.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_token_list([f"token number {i}" for i in range(260_000)])
    finish(writer)
    start, before = time.process_time(), peak_bytes()
    header = read_gguf_header(path)
    assert time.process_time() - start < 2  # takes 0.1 s; loose, because machines are shared
    assert peak_bytes() - before < 40 << 20
    assert header.metadata["tokenizer.ggml.tokens"][259_999] == "token number 259999"


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def split_sample(folder: Path) -> list[Path]:
    writer = gguf.GGUFWriter(str(folder / "big model.gguf"), "llama", split_max_tensors=5)
    writer.add_uint32("llama.block_count", 3)
    for i in range(12):
        writer.add_tensor(f"blk.{i}.ffn_up.weight", np.full((2, 32), i, np.float32))
    finish(writer)
    return sorted(folder.glob("*.gguf"))


def test_split_files(tmp_path: Path) -> None:
    """B158: any part stands for all of them; metadata comes from the first."""
    files = split_sample(tmp_path)
    assert len(files) == 3
    for file in files:
        header = read_gguf_header(file)
        assert header.files == tuple(files) and len(header.tensors) == 12
        assert header.metadata["llama.block_count"] == 3
        assert header.tensors["blk.11.ffn_up.weight"].file == files[2]


def test_broken_splits(tmp_path: Path) -> None:
    files = split_sample(tmp_path)
    renamed = tmp_path / "other.gguf"
    renamed.write_bytes(files[0].read_bytes())
    with pytest.raises(CheckpointError, match="one of 3 parts"):
        read_gguf_header(renamed)
    first = files[0].read_bytes()
    files[1].rename(tmp_path / "away")
    with pytest.raises(CheckpointError, match="00002-of-00003"):
        read_gguf_header(files[0])
    files[1].write_bytes(first)
    with pytest.raises(CheckpointError, match="should be part 1 of 3"):
        read_gguf_header(files[0])


def header_bytes(*keys: bytes, tensors: bytes = b"", num_tensors: int = 0, num_keys: int | None = None) -> bytes:
    count = len(keys) if num_keys is None else num_keys
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, count) + b"".join(keys) + tensors


def key(name: str, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + value


def tensor(name: str, dims: list[int], kind: int, offset: int) -> bytes:
    head = struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", len(dims))
    return head + struct.pack(f"<{len(dims)}Q", *dims) + struct.pack("<IQ", kind, offset)


def array(kind: int, count: int, body: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + body


def nested(depth: int) -> bytes:
    return array(9, 1, nested(depth - 1)) if depth else array(4, 1, b"\0" * 4)


HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "too short"),
    "other file": (b"PK\3\4" + b"\0" * 60, "not a GGUF"),
    "version 1": (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "little-endian"),
    "2**61 tensors": (header_bytes(num_tensors=2**61), "claims"),
    "2**64-1 tensors": (header_bytes(num_tensors=2**64 - 1), "claims"),
    "2**63 keys": (header_bytes(num_keys=2**63), "claims"),
    "keys beyond the file": (header_bytes(num_keys=60_000), "left in the file"),
    "key longer than the file": (header_bytes(struct.pack("<Q", 2**63) + b"a" * 9), "claims"),
    "string of 2**63 bytes": (header_bytes(key("a", 8, struct.pack("<Q", 2**63))), "claims"),
    "string beyond the file": (header_bytes(key("a", 8, struct.pack("<Q", 10**6))), "left in the file"),
    "array of 2**40": (header_bytes(key("a", 9, array(4, 2**40))), "claims"),
    "array of 2**64-1 strings": (header_bytes(key("a", 9, array(8, 2**64 - 1))), "claims"),
    "array beyond the file": (header_bytes(key("a", 9, array(0, MAX_ELEMENTS))), "left in the file"),
    "strings beyond the file": (
        header_bytes(key("a", 9, array(8, 2, struct.pack("<Q", 2**62) + b"\0" * 8))),
        "ends behind",
    ),
    "arrays of arrays": (header_bytes(key("a", 9, nested(3)), num_keys=1), "needs|left"),
    "deep arrays": (header_bytes(key("a", 9, nested(60))), "deeper"),
    "wide arrays": (header_bytes(key("a", 9, array(9, 70_000, array(0, 0) * 70_000))), "nested arrays"),
    "unknown value type": (header_bytes(key("a", 13, b"\0" * 8)), "unknown value type"),
    "unknown entry type": (header_bytes(key("a", 9, array(77, 1))), "unknown entry type"),
    "key twice": (header_bytes(key("a", 4, b"\0" * 4), key("a", 4, b"\0" * 4)), "twice"),
    "key not UTF-8": (header_bytes(struct.pack("<Q", 1) + b"\xff" + struct.pack("<I", 4) + b"\0" * 4), "UTF-8"),
    "alignment 0": (header_bytes(key("general.alignment", 4, b"\0" * 4)), "power of two"),
    "alignment text": (header_bytes(key("general.alignment", 8, struct.pack("<Q", 1) + b"x")), "power of two"),
    "five dimensions": (header_bytes(tensors=tensor("t", [1] * 5, 0, 0), num_tensors=1), "dimensions"),
    "2**32 dimensions": (
        header_bytes(tensors=struct.pack("<Q", 1) + b"t" + struct.pack("<I", 2**32 - 1) + b"\0" * 32, num_tensors=1),
        "dimensions",
    ),
    "dimension near 2**61": (header_bytes(tensors=tensor("t", [2**61, 4], 0, 0), num_tensors=1), "needs"),
    "product wraps to 0": (header_bytes(tensors=tensor("t", [2**32, 2**32], 0, 0), num_tensors=1), "needs"),
    "dimension 0": (header_bytes(tensors=tensor("t", [0, 4], 0, 0), num_tensors=1), "dimensions"),
    "half a block": (header_bytes(tensors=tensor("t", [33], 8, 0), num_tensors=1), "blocks of 32"),
    "unknown tensor type": (header_bytes(tensors=tensor("t", [32], 99, 0), num_tensors=1), "unknown type number 99"),
    "offset 2**63": (header_bytes(tensors=tensor("t", [1], 0, 2**63), num_tensors=1) + b"\0" * 64, "ends at byte"),
    "offset 2**64-32": (
        header_bytes(tensors=tensor("t", [8], 0, 2**64 - 32), num_tensors=1) + b"\0" * 64,
        "ends at byte",
    ),
    "unaligned offset": (header_bytes(tensors=tensor("t", [1], 0, 4), num_tensors=1) + b"\0" * 64, "alignment"),
    "truncated data": (header_bytes(tensors=tensor("t", [16], 0, 0), num_tensors=1) + b"\0" * 64, "truncated"),
    "overlap": (
        header_bytes(tensors=tensor("t", [16], 0, 0) + tensor("u", [16], 0, 32), num_tensors=2) + b"\0" * 200,
        "overlap",
    ),
    "tensor twice": (
        header_bytes(tensors=tensor("t", [8], 0, 0) + tensor("t", [8], 0, 32), num_tensors=2) + b"\0" * 200,
        "twice",
    ),
    "split count": (header_bytes(key("split.count", 4, struct.pack("<I", 2**31))), "split.count"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_headers(case: str, tmp_path: Path) -> None:
    """B166, B167: counts, lengths, dimensions and offsets up to 2**64 are errors at once, without allocating."""
    raw, message = HOSTILE[case]
    path = tmp_path / "hostile.gguf"
    path.write_bytes(raw)
    before, start = peak_bytes(), time.process_time()
    if case == "arrays of arrays":
        assert read_gguf_header(path).metadata["a"][0][0][0][0] == 0
        return
    with pytest.raises(CheckpointError, match=message) as error:
        read_gguf_header(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)
    assert peak_bytes() - before < 32 << 20
    assert time.process_time() - start < 1


def test_missing_file_and_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(CheckpointError, match="cannot be read"):
            read_gguf_header(path)


EXTREMES = [0, 1, 2, 7, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 1]


def mutate(rng: random.Random, raw: bytearray, limit: int) -> None:
    """Overwrite some bytes of the header with noise or with an extreme integer."""
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        at = rng.randrange(4, limit - 8)
        if rng.random() < 0.5:
            raw[at] = rng.randrange(256)
        else:
            raw[at : at + 8] = struct.pack("<Q", rng.choice(EXTREMES))


def fuzz(path: Path, original: bytes, limit: int, write: Callable[[bytes, int], None]) -> tuple[int, float]:
    """Mutate, read, restore; how many were refused, and the most CPU seconds one took."""
    rng, refused, longest = random.Random(5), 0, 0.0
    for _ in range(NUM_MUTATIONS):
        raw = bytearray(original)
        mutate(rng, raw, limit)
        write(bytes(raw), rng.choice([0, 0, 0, rng.randrange(len(raw))]))
        start = time.process_time()
        try:
            read_gguf_header(path)
        except CheckpointError as error:
            refused += 1
            assert "\n" not in str(error)
        longest = max(longest, time.process_time() - start)
    return refused, longest


def test_mutated_headers(sample: Path, tmp_path: Path) -> None:
    """B166, B167: 5,000 mutated or truncated files never crash the reader, and its memory stays flat."""
    original, path = sample.read_bytes(), tmp_path / "mutated.gguf"

    def write(raw: bytes, cut: int) -> None:
        path.write_bytes(raw[:cut] if cut else raw)

    header = read_gguf_header(sample)
    limit = min(t.offset for t in header.tensors.values())
    before = peak_bytes()
    refused, longest = fuzz(path, original, limit, write)
    assert refused > NUM_MUTATIONS // 3
    assert longest < 1 and peak_bytes() - before < 100 << 20


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300))
def test_arbitrary_bytes_after_the_magic(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "noise.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<I", 3) + raw)
    try:
        read_gguf_header(path)
    except CheckpointError as error:
        assert "\n" not in str(error)
