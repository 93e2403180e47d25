from __future__ import annotations

import contextlib
import math
import random
from pathlib import Path
from typing import Any

import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from samebits.core.point import Point
from samebits.errors import CheckpointError
from samebits.store.checkpoint import (
    BITS_BY_DTYPE,
    FoundPoint,
    PointHeader,
    TensorPart,
    read,
    tree,
    verify,
    write_point,
)
from samebits.store.checkpoint import point_format as header_format
from tests.store.disk_faults import names_in
from tests.store.points import CHUNK_BYTES, JOB, LAYOUT, TREE, change_byte, find, header_of, one_of_each_dtype, save


def write(root: Path, tensors: list[TensorPart], step: int = 7, chunk_bytes: int = CHUNK_BYTES) -> Path:
    return write_point(root, header_of(step), tensors, TREE, LAYOUT, chunk_bytes=chunk_bytes)


def test_everything_is_restored(tmp_path: Path) -> None:
    parts = one_of_each_dtype()
    path = write(tmp_path, parts)
    assert path == tmp_path / "0" / "step_0000000007_gen_000001"
    assert names_in(path) == ["data.safetensors", "manifest.msgpack"]
    found = find(tmp_path, 7)
    verify(found)
    checkpoint = read(found)
    assert checkpoint.header == header_of(7)
    assert checkpoint.tree == TREE
    assert checkpoint.layout == LAYOUT
    assert set(checkpoint.tensors) == {part.name for part in parts}
    for part in parts:
        loaded = checkpoint.tensors[part.name]
        assert (loaded.dtype, loaded.shape, bytes(loaded.data)) == (part.dtype, part.shape, bytes(part.data))


def test_safetensors_reads_the_data_file(tmp_path: Path) -> None:
    parts = {part.name: part for part in one_of_each_dtype()}
    data = (write(tmp_path, list(parts.values())) / "data.safetensors").read_bytes()
    loaded = dict(safetensors.deserialize(data))
    assert set(loaded) == set(parts)
    for name, part in parts.items():
        assert loaded[name]["dtype"] == part.dtype
        assert loaded[name]["shape"] == list(part.shape)
        assert bytes(loaded[name]["data"]) == part.data


def test_every_dtype_of_safetensors_is_supported() -> None:
    for dtype, bits in BITS_BY_DTYPE.items():
        part = TensorPart("t", dtype, (8,), bytes(bits))
        safetensors.deserialize(header_format.encode_header([part]) + part.data)


def test_torch_uses_the_tensors_without_a_copy(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    tensors = {
        "w": torch.randn(5, 3),
        "b": torch.randn(7).to(torch.bfloat16),
        "n": torch.tensor(41),
        "m": torch.tensor([True, False]),
    }
    names = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64", torch.bool: "BOOL"}
    parts = [
        TensorPart(name, names[tensor.dtype], tuple(tensor.shape), tensor.reshape(-1).view(torch.uint8).numpy().data)
        for name, tensor in tensors.items()
    ]
    path = write(tmp_path, parts)
    checkpoint = read(find(tmp_path, 7))
    from_library = load_file(path / "data.safetensors")
    for name, tensor in tensors.items():
        part = checkpoint.tensors[name]
        loaded = torch.frombuffer(part.data, dtype=tensor.dtype).reshape(part.shape)
        assert torch.equal(loaded, tensor)
        assert torch.equal(from_library[name], tensor)
    loaded = torch.frombuffer(checkpoint.tensors["w"].data, dtype=torch.float32)
    loaded += 1
    again = torch.frombuffer(checkpoint.tensors["w"].data, dtype=torch.float32).reshape(5, 3)
    assert torch.equal(again, tensors["w"] + 1), "the memory is writable and shared"


def test_tensors_are_aligned_to_their_elements(tmp_path: Path) -> None:
    odd = [TensorPart("a byte", "U8", (1,), b"x"), TensorPart("two bytes", "BF16", (1,), b"xy")]
    path = write(tmp_path, [*odd, *one_of_each_dtype()])
    data = (path / "data.safetensors").read_bytes()
    length = header_format.decode_header_length(data[:8], len(data))
    assert (8 + length) % 64 == 0
    for entry in header_format.decode_header(data[8 : 8 + length], len(data)):
        assert entry.start % max(1, BITS_BY_DTYPE[entry.dtype] // 8) == 0, entry


@pytest.mark.parametrize("chunk_bytes", [1, 7, 64, 127, 128, 129, 10_000, 8 * 1024 * 1024])
def test_every_chunk_size(tmp_path: Path, chunk_bytes: int) -> None:
    write(tmp_path, one_of_each_dtype(), chunk_bytes=chunk_bytes)
    found = find(tmp_path, 7)
    verify(found)
    manifest = found.require_manifest()
    assert len(manifest.chunks) == math.ceil(manifest.data_bytes / chunk_bytes)
    assert bytes(read(found).tensors["a scalar"].data) == bytes(range(8))


def test_point_without_tensors(tmp_path: Path) -> None:
    write(tmp_path, [])
    assert read(find(tmp_path, 7)).tensors == {}


@settings(max_examples=50, deadline=None)
@given(
    st.dictionaries(
        st.text(max_size=20).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(["U8", "I16", "BF16", "F32", "F64"]), st.lists(st.integers(0, 4), max_size=3)),
        max_size=8,
    ),
    st.integers(1, 300),
    st.randoms(use_true_random=False),
)
def test_random_tensors(
    tmp_path_factory: pytest.TempPathFactory,
    tensors: dict[str, tuple[str, list[int]]],
    chunk_bytes: int,
    source: random.Random,
) -> None:
    root = tmp_path_factory.mktemp("any")
    parts = [
        TensorPart(name, dtype, tuple(shape), source.randbytes(math.prod(shape) * BITS_BY_DTYPE[dtype] // 8))
        for name, (dtype, shape) in tensors.items()
    ]
    write(root, parts, chunk_bytes=chunk_bytes)
    loaded = read(find(root, 7)).tensors
    assert {name: (part.dtype, part.shape, bytes(part.data)) for name, part in loaded.items()} == {
        part.name: (part.dtype, part.shape, part.data) for part in parts
    }


# ---- what cannot be saved -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ([TensorPart("w", "F32", (2,), bytes(7))], "7 bytes; F32 of shape .2,. has 8"),
        ([TensorPart("w", "C128", (2,), bytes(32))], "dtype 'C128'"),
        ([TensorPart("w", "F32", (-1,), b"")], "shape"),
        ([TensorPart("w", "F4", (3,), bytes(2))], "whole bytes"),
        ([TensorPart("w", "U8", (1,), b"x"), TensorPart("w", "U8", (1,), b"y")], "'w': the name is already used"),
        ([TensorPart("__metadata__", "U8", (1,), b"x")], "the name is already used"),
        ([TensorPart("\ud800", "U8", (1,), b"x")], "not valid text"),
        ([TensorPart("w", "U8", (2,), memoryview(b"abcd")[::2])], "not contiguous"),
    ],
)
def test_unsupported_tensor_is_refused(tmp_path: Path, parts: list[TensorPart], problem: str) -> None:
    with pytest.raises(CheckpointError, match=problem):
        write(tmp_path, parts)
    assert names_in(tmp_path / "0") == []


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"optimizer": {"lr": [1.0, {2}]}}, r"manifest\['tree'\]\['optimizer'\]\['lr'\]\[1\]: a builtins.set"),
        ({"x": object()}, r"\['x'\]: a builtins.object"),
        ({(1, 2): 3}, "key of type tuple"),
        ({"x": bytearray(b"x")}, "bytearray"),
        ({"x": "\ud800"}, "not valid unicode"),
        (nested(200), "nested more than"),
        ({"x": [0] * (tree.MAX_ITEMS + 1)}, "items; at most"),
        ({"x": bytes(tree.MAX_TREE_BYTES)}, "keep large values in tensors"),
    ],
)
def test_unsupported_state_is_named_by_its_path(tmp_path: Path, value: Any, problem: str) -> None:
    with pytest.raises(CheckpointError, match=problem):
        write_point(tmp_path, header_of(1), [], value, None)
    assert names_in(tmp_path / "0") == []


@pytest.mark.parametrize(
    ("step", "generation", "world_size", "rank"), [(-1, 1, 1, 0), (0, 0, 1, 0), (0, 1, 1, 1), (2**63, 1, 1, 0)]
)
def test_invalid_point_is_refused(step: int, generation: int, world_size: int, rank: int) -> None:
    with pytest.raises(CheckpointError, match="a point"):
        PointHeader(JOB, Point(step, generation), world_size, rank, rank, "0")


# ---- trees --------------------------------------------------------------------------------------------------------

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.binary()
)
TREES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(SCALARS, inner, max_size=4)
    ),
    max_leaves=30,
)


def typed(value: Any) -> Any:
    """Return the value with every type written out, since 1 == True == 1.0 and 0.0 == -0.0."""
    if isinstance(value, dict):
        return ("dict", [(typed(key), typed(item)) for key, item in value.items()])
    if isinstance(value, list | tuple):
        return (type(value).__name__, [typed(item) for item in value])
    return (type(value).__name__, repr(value))


@settings(max_examples=300, deadline=None)
@given(TREES)
def test_tree_round_trip_keeps_values_and_types(value: Any) -> None:
    assert typed(tree.decode(tree.encode(value))) == typed(value)


def test_generator_states_round_trip(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    generator = random.Random(5)
    state = {"python": generator.getstate(), "numpy": numpy.random.default_rng(5).bit_generator.state}
    write_point(tmp_path, header_of(7), [], state, None)
    loaded = read(find(tmp_path, 7)).tree
    assert loaded == state
    restored = random.Random()
    restored.setstate(loaded["python"])
    assert restored.random() == generator.random()


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60))
def test_invalid_tree_bytes_raise_one_kind_of_error(data: bytes) -> None:
    with contextlib.suppress(ValueError):  # any other error fails this test
        tree.decode(data)


@pytest.mark.parametrize("data", [b"\x91" * 5000 + b"\x01", b"\xdd\xff\xff\xff\xff", b"\x81\x90\x01", b"\xc1", b""])
def test_hostile_bytes_are_bounded(data: bytes) -> None:
    with pytest.raises(ValueError):
        tree.decode(data)


def test_hostile_extensions_are_bounded() -> None:
    data = b"\x90"
    for _ in range(500):
        data = b"\xc9" + len(data).to_bytes(4, "big") + b"\x01" + data
    with pytest.raises(ValueError, match="levels left"):
        tree.decode(data)


# ---- into existing memory


def targets_of(found: FoundPoint) -> dict[str, TensorPart]:
    return {name: part._replace(data=bytearray(len(part.data))) for name, part in read(found).tensors.items()}


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("chunk_bytes", [1, 7, 100, 4096, 10**6])
def test_point_is_read_into_given_memory(tmp_path: Path, chunk_bytes: int, threads: int) -> None:
    parts = {part.name: part for part in one_of_each_dtype()}
    write_point(tmp_path, header_of(7), parts.values(), TREE, LAYOUT, chunk_bytes=chunk_bytes)
    found = find(tmp_path, 7)
    targets = targets_of(found)
    others = {
        "all.F32": targets.pop("all.F32"),
        "all.I8": TensorPart("all.I8", "I8", (12, 2), bytearray(24)),
        "all.I16": TensorPart("all.I16", "U16", (2, 12), bytearray(48)),
        "unknown": TensorPart("unknown", "I8", (5,), bytearray(5)),
    }
    targets |= {name: part for name, part in others.items() if name != "all.F32"}
    checkpoint = read(found, targets, threads=threads)
    assert (checkpoint.header, checkpoint.tree, checkpoint.layout) == (header_of(7), TREE, LAYOUT)
    assert {name: (part.dtype, part.shape, bytes(part.data)) for name, part in checkpoint.tensors.items()} == {
        name: (part.dtype, part.shape, bytes(part.data)) for name, part in parts.items()
    }
    taken = {name for name, part in checkpoint.tensors.items() if part is targets.get(name)}
    assert taken == parts.keys() - others.keys()
    assert all(bytes(other.data) == bytes(len(other.data)) for other in others.values())


@pytest.mark.parametrize("threads", [1, 3])
def test_damaged_tensor_raises_wherever_it_is_read_to(tmp_path: Path, threads: int) -> None:
    found = save(tmp_path, 7)
    targets = targets_of(found)
    size_bytes = found.require_manifest().data_bytes
    for position in range(size_bytes):
        change_byte(found.path / "data.safetensors", position)
        with pytest.raises(CheckpointError, match=f"chunk {position // CHUNK_BYTES} of"):
            read(found, targets, threads=threads)
        change_byte(found.path / "data.safetensors", position)
    read(found, targets, threads=threads)


def test_first_of_several_damaged_chunks_is_named(tmp_path: Path) -> None:
    found = save(tmp_path, 7)
    size_bytes = found.require_manifest().data_bytes
    assert size_bytes > 2 * CHUNK_BYTES
    for position in range(CHUNK_BYTES, size_bytes, CHUNK_BYTES):
        change_byte(found.path / "data.safetensors", position)
    for threads in (1, 2, 8):
        with pytest.raises(CheckpointError, match="chunk 1 of"):
            read(found, threads=threads)
