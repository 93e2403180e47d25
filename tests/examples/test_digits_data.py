"""Reading digits: the bundled ones, and IDX files that are complete, truncated, too long or of another kind."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import pytest
import torch

from examples.digits.data import MAX_IDX_BYTES, DataError, load_digits, read_idx


def idx(shape: tuple[int, ...], data: bytes, kind: int = 0x08) -> bytes:
    return bytes([0, 0, kind, len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + data


def write_mnist(folder: Path, count: int = 6, size: int = 5, zipped: bool = False) -> None:
    pixels = bytes(range(256)) * (count * size * size // 256 + 1)
    for part, offset in (("train", 0), ("t10k", 3)):
        images = idx((count, size, size), pixels[offset : offset + count * size * size])
        labels = idx((count,), bytes((offset + i) % 10 for i in range(count)))
        for name, data in ((f"{part}-images-idx3-ubyte", images), (f"{part}-labels-idx1-ubyte", labels)):
            if zipped:
                (folder / f"{name}.gz").write_bytes(gzip.compress(data))
            else:
                (folder / name).write_bytes(data)


def test_bundled_digits_are_always_split_the_same_way() -> None:
    once, again = load_digits(None), load_digits("")
    assert (len(once.train), len(once.held_out), once.image_size) == (1437, 360, 8)
    for first, second in ((once.train, again.train), (once.held_out, again.held_out)):
        assert all(torch.equal(a, b) for a, b in zip(first.tensors, second.tensors, strict=True))


def test_bundled_digits_have_the_documented_form() -> None:
    digits = load_digits(None)
    images, labels = digits.train.tensors
    assert (images.dtype, tuple(images.shape[1:]), labels.dtype) == (torch.float32, (1, 8, 8), torch.int64)
    assert (images.min().item(), images.max().item()) == (0.0, 1.0)
    assert labels.unique().tolist() == digits.held_out.tensors[1].unique().tolist() == list(range(10))


@pytest.mark.parametrize("zipped", [False, True])
def test_mnist_files_are_read_plain_and_zipped(tmp_path: Path, zipped: bool) -> None:
    write_mnist(tmp_path, zipped=zipped)
    digits = load_digits(str(tmp_path))
    images, labels = digits.train.tensors
    assert digits.image_size == 5
    assert tuple(images.shape) == (6, 1, 5, 5)
    assert images[0, 0, 1, 2].item() == pytest.approx(7 / 255)
    assert labels.tolist() == [0, 1, 2, 3, 4, 5]
    assert digits.held_out.tensors[1].tolist() == [3, 4, 5, 6, 7, 8]


WHOLE = idx((2, 3), bytes(range(6)))


def test_complete_idx_file_keeps_shape_and_order(tmp_path: Path) -> None:
    file = tmp_path / "numbers"
    file.write_bytes(WHOLE)
    assert read_idx(file, dimensions=2).tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "begins with nothing, expected 00000802"),
        (b"\x89PNG", "begins with 89504e47, expected 00000802"),
        (idx((2, 3), bytes(24), kind=0x0D), "begins with 00000d02, expected 00000802"),
        (idx((6,), bytes(6)), "begins with 00000801, expected 00000802"),
        (WHOLE[:9], "ends inside its header, after 9 bytes"),
        (WHOLE[:-1], "promises 6 bytes of data, found 5 bytes"),
        (WHOLE + b"\0", "promises 6 bytes of data, found more"),
        (idx((0, 3), b""), f"promises 0 bytes of data, expected 1 to {MAX_IDX_BYTES}"),
        (idx((2**32 - 1, 2**32 - 1), b""), f"expected 1 to {MAX_IDX_BYTES}"),
    ],
)
def test_bad_idx_file_is_named_in_one_sentence(tmp_path: Path, content: bytes, expected: str) -> None:
    for file, data in ((tmp_path / "numbers", content), (tmp_path / "numbers.gz", gzip.compress(content))):
        file.write_bytes(data)
        with pytest.raises(DataError) as caught:
            read_idx(file, dimensions=2)
        assert str(caught.value).startswith(f"{file}: ")
        assert expected in str(caught.value)
        assert "\n" not in str(caught.value)


def test_damaged_gzip_file_is_named(tmp_path: Path) -> None:
    zipped = gzip.compress(idx((40, 50), bytes(i % 251 for i in range(2000))))
    flipped = zipped[:40] + bytes([zipped[40] ^ 0xFF]) + zipped[41:]
    for damaged in (zipped[:-20], flipped, b"no gzip"):
        file = tmp_path / "numbers.gz"
        file.write_bytes(damaged)
        with pytest.raises(DataError, match=r"numbers\.gz: is no whole gzip file"):
            read_idx(file, dimensions=2)


@pytest.mark.parametrize("given", ["MNIST_Data", "MNIST_Data/train", "MNIST_Data/test"])
def test_both_folders_of_mindspores_mnist_form_one_data_set(tmp_path: Path, given: str) -> None:
    write_mnist(tmp_path)
    for folder, part in (("train", "train"), ("test", "t10k")):
        (tmp_path / "MNIST_Data" / folder).mkdir(parents=True)
        for file in tmp_path.glob(f"{part}-*"):
            file.rename(tmp_path / "MNIST_Data" / folder / file.name)
    digits = load_digits(str(tmp_path / given) + "/")
    assert (len(digits.train), len(digits.held_out)) == (6, 6)


def test_folder_without_the_files_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"found neither train-images-idx3-ubyte nor train-images-idx3-ubyte\.gz"):
        load_digits(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("train-labels-idx1-ubyte", idx((5,), bytes(5)), "5 labels for 6 images in train-images-idx3-ubyte"),
        ("t10k-labels-idx1-ubyte", idx((6,), bytes([0, 1, 2, 3, 4, 10])), "holds label 10, expected 0 to 9"),
        ("t10k-images-idx3-ubyte", idx((6, 5, 4), bytes(120)), "images of 5x4, expected squares from 4x4 on"),
        ("t10k-images-idx3-ubyte", idx((6, 7, 7), bytes(294)), r"differ in size, \[5, 7\]"),
    ],
)
def test_mismatched_files_are_named(tmp_path: Path, name: str, content: bytes, expected: str) -> None:
    write_mnist(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=expected):
        load_digits(str(tmp_path))
