"""The hashes of a data file's chunks, from its bytes in pieces.

Nothing is read or written here. The one idea: chunks are cut from the file as a whole, wherever its pieces begin and
end.
"""

from __future__ import annotations

from collections.abc import Iterable

import xxhash


def hash_chunks(views: Iterable[memoryview], chunk_bytes: int) -> tuple[int, tuple[bytes, ...]]:
    """The size of the data, and the hash of each chunk, wherever the views begin and end."""
    size_bytes, chunks, digest = 0, [], xxhash.xxh3_128()
    for view in views:
        while view:
            piece, view = view[: chunk_bytes - size_bytes % chunk_bytes], view[chunk_bytes - size_bytes % chunk_bytes :]
            digest.update(piece)
            size_bytes += len(piece)
            if size_bytes % chunk_bytes == 0:
                chunks.append(digest.digest())
                digest = xxhash.xxh3_128()
    if size_bytes % chunk_bytes:
        chunks.append(digest.digest())
    return size_bytes, tuple(chunks)
