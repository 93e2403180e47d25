"""Read a ``torch.distributed.checkpoint`` directory without running code from it.

The format stores its index, and every value that is not a tensor, as a pickle. The reader and planner in this module
replace torch's own, which unpickle without restrictions. An index needs only a dozen simple classes, so the unpickler
accepts only these and rejects any other name before looking it up.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import metadata as index
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import ReadItem

from samebits.errors import CheckpointError
from samebits.named_file import read_named_file

_INDEX_FILE = ".metadata"
_MOST_INDEX_BYTES = 1 << 30


class SafeReader(dcp.FileSystemReader):
    """Torch's reader, with an unpickler that accepts only the classes of an index."""

    def read_metadata(self, *_: Any, **__: Any) -> index.Metadata:
        """Return the directory's index.

        Raises:
            CheckpointError: the index is missing, or names a class that does not belong in an index.
        """
        path = Path(self.path, _INDEX_FILE)
        try:
            content = read_named_file(path, _MOST_INDEX_BYTES)
        except OSError as error:
            raise CheckpointError(
                f"{path}: the index cannot be read: {error.strerror}. Fix: name a directory that "
                "torch.distributed.checkpoint has written"
            ) from error
        try:
            found = _IndexUnpickler(io.BytesIO(content)).load()
        except Exception as error:  # a damaged pickle may raise anything
            raise CheckpointError(f"{path} is not an index of torch.distributed.checkpoint: {error}") from error
        if not isinstance(found, index.Metadata) or not isinstance(found.storage_data, dict):
            raise CheckpointError(f"{path} is not an index of torch.distributed.checkpoint: a {type(found).__name__}")
        return found


def _joined(*parts: str) -> str:
    """Join the parts of a path in the index as text; the result is never used."""
    return "/".join(parts)


class _IndexUnpickler(pickle.Unpickler):
    _KNOWN: Mapping[tuple[str, str], Any] = {
        **{
            (index.__name__, kind.__name__): kind
            for kind in (
                index.BytesStorageMetadata,
                index.ChunkStorageMetadata,
                index.Metadata,
                index.MetadataIndex,
                index.StorageMeta,
                index.TensorProperties,
                index.TensorStorageMetadata,
                index._MEM_FORMAT_ENCODING,
            )
        },
        (_StorageInfo.__module__, _StorageInfo.__name__): _StorageInfo,
        ("torch", "Size"): torch.Size,
        ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
        ("collections", "OrderedDict"): dict,
        **{("pathlib", name): _joined for name in ("Path", "PosixPath", "WindowsPath", "PurePosixPath")},
    }

    def find_class(self, module: str, name: str) -> Any:
        """Return the class if an index may contain it; otherwise, raise an error."""
        dtype = getattr(torch, name, None) if module == "torch" and name.isidentifier() else None
        if isinstance(dtype, torch.dtype):
            return dtype
        try:
            return self._KNOWN[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which does not belong in an index") from None


class SafePlanner(dcp.DefaultLoadPlanner):
    """Loads values by their flat names. Values other than tensors are loaded with ``weights_only``."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load plain data only. Torch's own method would unpickle anything."""
        name = read_item.dest_index.fqn
        try:
            self.state_dict[name] = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"{name} is neither a tensor nor plain data, so it is not read: {str(error).splitlines()[0]}"
            ) from None
