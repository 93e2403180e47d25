"""Send a point to another rank in pieces, without a second copy at either end.

::

  preface   magic "\x93SBSTR\x01\n" | manifest size u64 | header size u64 | manifest.msgpack, its digests empty |
            the header of data.safetensors | xxh3_128 of that header
  pieces    up to ``PIECE_BYTES`` of the tensors' bytes, in the order of the file, followed by their xxh3_128,
            whose seed is the number of the piece

Every piece has its own hash, so one piece can be prepared while another travels and a third is verified and stored.
The caller moves the bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping

import xxhash

from samebits.errors import CheckpointError
from samebits.store.checkpoint.point_format import (
    CHUNK_BYTES,
    MAX_HEADER_BYTES,
    MAX_MANIFEST_BYTES,
    Manifest,
    PointHeader,
    TensorPart,
    bytes_of,
    decode_manifest,
    encode_header,
    encode_manifest,
    in_file_order,
)
from samebits.store.checkpoint.reading import LoadedPoint, decode_tensor_header, places_of
from samebits.store.checkpoint.tree import Tree

PIECE_BYTES = 4 * 1024 * 1024
MAX_PREFACE_BYTES = MAX_MANIFEST_BYTES + MAX_HEADER_BYTES + 1024

_HEAD = struct.Struct("<8sQQ")
_MAGIC = b"\x93SBSTR\x01\n"
_DIGEST_BYTES = 16
_ORIGIN = "a point received from another rank"


class Outgoing:
    """A point to send.

    Args:
        header: the point's header.
        tree: the point's tree.
        layout: the point's layout.
        file_header: the header of its data file.
        views: the rest of that file in memory; it must not change until all pieces have been sent.

    Attributes:
        preface: the bytes to send before the pieces.
        data_bytes: the total size of all pieces, without their hashes.
    """

    def __init__(
        self, header: PointHeader, tree: Tree, layout: Tree, file_header: bytes, views: Iterable[memoryview]
    ) -> None:
        views = [view for view in views if view]
        self.data_bytes = sum(map(len, views))
        self._rest = views[::-1]
        self._number = 0
        file_bytes = len(file_header) + self.data_bytes
        unknown = (bytes(_DIGEST_BYTES),) * -(-file_bytes // CHUNK_BYTES)
        manifest = encode_manifest(Manifest(header, layout, tree, file_bytes, CHUNK_BYTES, unknown))
        head = _HEAD.pack(_MAGIC, len(manifest), len(file_header))
        self.preface = b"".join([head, manifest, file_header, xxhash.xxh3_128_digest(file_header)])

    @classmethod
    def of_state(cls, header: PointHeader, tensors: Iterable[TensorPart], tree: Tree, layout: Tree) -> Outgoing:
        """Prepare a point that is not on disk. The arguments are those of ``write_point``.

        Raises:
            CheckpointError: the state cannot be saved faithfully; the message names the value.
        """
        parts = in_file_order(tensors)
        return cls(header, tree, layout, encode_header(parts), map(bytes_of, parts))

    @classmethod
    def of_point(cls, point: LoadedPoint) -> Outgoing:
        """Prepare a point that was read from disk, and therefore verified."""
        return cls.of_state(point.header, point.tensors.values(), point.tree, point.layout)

    def fill(self, piece: memoryview) -> None:
        """Fill the next piece; its length comes from :func:`sizes_of`."""
        content = piece[:-_DIGEST_BYTES]
        _move(self._rest, content, outwards=True)
        piece[-_DIGEST_BYTES:] = xxhash.xxh3_128_digest(content, self._number)
        self._number += 1


class IncomingPoint:
    """A point that is being received.

    Args:
        preface: the preface that was received.
        job: id of the job whose points are accepted.
        targets: tensors to fill, as in ``reading.read``; after an error their content is undefined.

    Attributes:
        layout: the point's layout.
        data_bytes: the total size of all pieces, without their hashes.

    Raises:
        CheckpointError: the preface is not what was sent, or belongs to another job.
    """

    def __init__(self, preface: memoryview, job: str, targets: Mapping[str, TensorPart]) -> None:
        manifest, file_header = _preface_of(preface)
        if manifest.header.job != job:
            raise CheckpointError(f"{_ORIGIN}: it belongs to job {manifest.header.job}, but this is job {job}")
        entries = decode_tensor_header(lambda start, end: bytes(file_header[start:end]), manifest, _ORIGIN)
        tensors, (_, *views) = places_of(entries, targets, manifest.data_bytes)
        self.layout = manifest.layout
        self.data_bytes = manifest.data_bytes - len(file_header)
        self._rest = [view for view in views if view][::-1]
        self._number = 0
        self._point = LoadedPoint(manifest.header, tensors, manifest.tree, manifest.layout)

    def take(self, piece: memoryview) -> None:
        """Store the next piece; raise :class:`CheckpointError` if it is not what was sent."""
        content, digest = piece[:-_DIGEST_BYTES], piece[-_DIGEST_BYTES:]
        if xxhash.xxh3_128_digest(content, self._number) != digest:
            raise CheckpointError(f"{_ORIGIN}: piece {self._number} is not what was sent; request it again")
        self._number += 1
        _move(self._rest, content, outwards=False)

    def point(self) -> LoadedPoint:
        """Return the point; call this after the last piece."""
        assert not self._rest, "not everything has come"
        return self._point


def sizes_of(data_bytes: int) -> list[int]:
    """Return the length of each piece, including its hash."""
    starts = range(0, data_bytes, PIECE_BYTES)
    return [min(PIECE_BYTES, data_bytes - start) + _DIGEST_BYTES for start in starts]


def _preface_of(preface: memoryview) -> tuple[Manifest, memoryview]:
    if len(preface) < _HEAD.size:
        raise CheckpointError(
            f"{_ORIGIN}: the first {len(preface)} bytes are not the start of a point; request it again"
        )
    magic, manifest_bytes, header_bytes = _HEAD.unpack_from(preface)
    header_start = _HEAD.size + manifest_bytes
    header_end = header_start + header_bytes
    if magic != _MAGIC or header_end + _DIGEST_BYTES != len(preface):
        raise CheckpointError(
            f"{_ORIGIN}: the first {len(preface)} bytes are not the start of a point; request it again"
        )
    try:
        manifest = decode_manifest(bytes(preface[_HEAD.size : header_start]))
    except CheckpointError as error:
        raise CheckpointError(f"{_ORIGIN}: {error}; request it again") from None
    file_header = preface[header_start:header_end]
    if xxhash.xxh3_128_digest(file_header) != preface[header_end:]:
        raise CheckpointError(f"{_ORIGIN}: its list of tensors differs from what was sent; request it again")
    return manifest, file_header


def _move(rest: list[memoryview], content: memoryview, *, outwards: bool) -> None:
    """Copy between a piece and the views; the list of views is consumed from its end."""
    while content:
        view = rest.pop()
        count = min(len(view), len(content))
        if outwards:
            content[:count] = view[:count]
        else:
            view[:count] = content[:count]
        if count < len(view):
            rest.append(view[count:])
        content = content[count:]
