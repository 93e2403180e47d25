"""A point's tensors as a plain safetensors file, for any other program: verified on the way, and there whole or not.

Only the copy lives here; which point, where to and what the metadata says is the caller's. The one idea: the bytes of
the tensors are taken as they lie, so that no dtype needs a library, and each chunk is compared before it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from runtime.store import durable
from runtime.store.checkpoint.reading import tensor_entries, verified_chunks
from runtime.store.checkpoint.safetensors_header import encode_header
from runtime.store.checkpoint.scanning import FoundPoint


def export_tensors(
    found: FoundPoint,
    path: Path,
    metadata: Mapping[str, str],
    *,
    replace: bool = False,
    on_bytes: Callable[[int], object] | None = None,
) -> None:
    """Write the point's tensors to the file ``path``, durably.

    Args:
        found: the point.
        path: the file; ``replace`` says whether one that is there may go.
        metadata: goes into the file's header.
        replace: see ``path``.
        on_bytes: is told how many bytes were compared and written, chunk by chunk.

    Raises:
        CheckpointError: the point is not whole; there is no file then.
        StoreError: the disk refuses, or there is a file of that name already.
    """
    entries = tensor_entries(found)
    data_start = min((entry.start for entry in entries), default=found.require_manifest().data_bytes)
    with durable.new_file(path, replace=replace) as descriptor:
        durable.write_all(descriptor, encode_header(entries, metadata))
        for start, chunk in verified_chunks(found):
            durable.write_all(descriptor, chunk[max(0, data_start - start) :])
            if on_bytes is not None:
                on_bytes(len(chunk))
