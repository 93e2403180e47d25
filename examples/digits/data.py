"""The digits to train on, split the same way in every process: scikit-learn's 1,797, or MNIST from DATA_PATH.

This module only reads; it downloads and writes nothing. Every part of a file is checked before it is used, so that a
wrong, truncated or oversized one is reported in one sentence before memory is allocated for it.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch.utils.data import TensorDataset

IDX_UNSIGNED_BYTE = 0x08
MAX_IDX_BYTES = 1 << 30
HELD_OUT_OF = 5


class DataError(ValueError):
    """A data file cannot be used; the message says which, what was found and what was expected."""


@dataclass(frozen=True, slots=True)
class Digits:
    """Pairs of image (float32, 1 × size × size, 0..1) and label (int64, 0..9)."""

    train: TensorDataset
    held_out: TensorDataset
    image_size: int


def load_digits(data_path: str | None) -> Digits:
    """Return MNIST from the IDX files in ``data_path``, or scikit-learn's 8×8 digits without one."""
    return _load_mnist(Path(data_path)) if data_path else _load_bundled()


def _load_bundled() -> Digits:
    try:
        from sklearn.datasets import load_digits as load_bundled_digits
    except ModuleNotFoundError:
        raise DataError(
            "scikit-learn, which brings the digits, is missing: bash scripts/setup.sh installs it"
        ) from None
    bundled = load_bundled_digits()
    images = torch.from_numpy(bundled.images).to(torch.float32).unsqueeze(1) / 16
    labels = torch.from_numpy(bundled.target).to(torch.int64)
    # The writers come one after another, so every fifth digit is a fair sample of all of them.
    held_out = torch.arange(len(labels)) % HELD_OUT_OF == 0
    return Digits(
        train=TensorDataset(images[~held_out], labels[~held_out]),
        held_out=TensorDataset(images[held_out], labels[held_out]),
        image_size=images.shape[-1],
    )


def _load_mnist(folder: Path) -> Digits:
    train, held_out = _load_labelled(folder, "train"), _load_labelled(folder, "t10k", beside="test")
    sizes = {part.tensors[0].shape[-1] for part in (train, held_out)}
    if len(sizes) != 1:
        raise DataError(f"{folder}: the training and t10k images differ in size, {sorted(sizes)}: expected one size")
    return Digits(train=train, held_out=held_out, image_size=sizes.pop())


def _load_labelled(folder: Path, part: str, beside: str = "train") -> TensorDataset:
    """Load images and labels. ``beside``: where MindSpore's MNIST_Data has this part, whether its folder or one of its
    two is named.
    """
    folders = (folder, folder / beside, folder.parent / beside)
    images_file, labels_file = _find(folders, f"{part}-images-idx3-ubyte"), _find(folders, f"{part}-labels-idx1-ubyte")
    images, labels = read_idx(images_file, dimensions=3), read_idx(labels_file, dimensions=1)
    if len(images) != len(labels):
        raise DataError(f"{labels_file}: {len(labels)} labels for {len(images)} images in {images_file.name}")
    if images.shape[1] != images.shape[2] or images.shape[1] < 4:
        raise DataError(f"{images_file}: images of {images.shape[1]}x{images.shape[2]}, expected squares from 4x4 on")
    if labels.max() > 9:
        raise DataError(f"{labels_file}: holds label {labels.max()}, expected 0 to 9")
    return TensorDataset(images.to(torch.float32).unsqueeze(1) / 255, labels.to(torch.int64))


def _find(folders: tuple[Path, ...], name: str) -> Path:
    for candidate in (file for folder in folders for file in (folder / name, folder / f"{name}.gz")):
        if candidate.is_file():
            return candidate
    looked = ", ".join(map(str, folders[1:]))
    raise DataError(
        f"DATA_PATH={folders[0]}: found neither {name} nor {name}.gz there, nor in {looked}. "
        "Fix: export DATA_PATH=<the folder with the four MNIST files>, or unset it for the bundled digits"
    )


def read_idx(file: Path, dimensions: int) -> torch.Tensor:
    """Return the content of an IDX file of unsigned bytes, plain or gzipped, as uint8 in its header's shape.

    The format is that of http://yann.lecun.com/exdb/mnist: two zero bytes, the type, the number of dimensions, each
    dimension as four bytes with the highest first, then the data. Raises :class:`DataError` for anything else.
    """
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
            return _read_idx(stream, file, dimensions)
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise DataError(f"{file}: is no whole gzip file ({error}); fetch it again") from None


def _read_idx(stream: BinaryIO | gzip.GzipFile, file: Path, dimensions: int) -> torch.Tensor:
    expected = bytes([0, 0, IDX_UNSIGNED_BYTE, dimensions])
    magic = stream.read(len(expected))
    if magic != expected:
        raise DataError(
            f"{file}: begins with {magic.hex() or 'nothing'}, expected {expected.hex()}: another kind of file"
        )
    header = stream.read(4 * dimensions)
    if len(header) != 4 * dimensions:
        raise DataError(f"{file}: ends inside its header, after {4 + len(header)} bytes; fetch it again")
    shape = struct.unpack(f">{dimensions}I", header)
    size = math.prod(shape)
    if not 0 < size <= MAX_IDX_BYTES:
        raise DataError(f"{file}: its header promises {size} bytes of data, expected 1 to {MAX_IDX_BYTES}")
    data = stream.read(size + 1)
    if len(data) != size:
        found = "more" if len(data) > size else f"{len(data)} bytes"
        raise DataError(f"{file}: its header promises {size} bytes of data, found {found}; fetch it again")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).reshape(shape)
