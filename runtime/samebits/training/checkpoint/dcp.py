"""Export points as ``torch.distributed.checkpoint`` directories, and load such directories into a new job's state.

SameBits' own points never use this format. Tensors are written unsharded, under the names that they have in the
training script, so the reader may have a different number of ranks than the writer. The format has no hashes: data is
verified before it is written, but later damage to the directory is not detected.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import metadata as index

from samebits.errors import CheckpointError, StoreError, UsageError
from samebits.service import log
from samebits.store import durable
from samebits.store.checkpoint import LoadedPoint
from samebits.training import value_trees
from samebits.training.checkpoint.dcp_index import SafePlanner, SafeReader
from samebits.training.checkpoint.export import ORIGIN, require_readable, values_of
from samebits.training.sharding.whole import whole
from samebits.training.state import rng, snapshot
from samebits.training.state.object_state import ObjectState

# --- writing ----------------------------------------------------------------------------------------------------------


def export_dcp(points: Sequence[LoadedPoint], path: Path) -> None:
    """Write one step's state to the new directory ``path``, completely or not at all.

    A program of any world size reads it with ``torch.distributed.checkpoint.load``. ``model`` and ``optimizer`` are
    these objects' ``state_dict()``, other values keep their names, and ``samebits`` records the origin (job, step,
    generation). Needs memory for two copies of the whole state.

    Args:
        points: verified points, one of every rank if the state is sharded, else one of any rank.
        path: the directory to create.

    Raises:
        CheckpointError: a rank's point is missing, or the state holds a value that cannot be read back from this
            format.
        StoreError: a disk error, or ``path`` exists.
    """
    joined = [snapshot.state_in(point.tree, point.tensors) for point in points]
    header = points[0].header
    trees = [values_of(point.header, one) for point, one in zip(points, joined, strict=True)]
    values = whole(trees, [one["own"].get("shards", {}) for one in joined])
    if ORIGIN in values:
        raise CheckpointError(f"{header.point}: the state has a value called {ORIGIN!r}. Fix: rename it")
    content = {
        **values,
        ORIGIN: {
            "job": header.job,
            "step": header.point.step,
            "generation": header.point.generation,
            "world_size": header.world_size,
            "values": sorted(values),
        },
    }
    require_readable(content, "state")
    if os.path.lexists(path):
        raise StoreError(f"{path} already exists. Fix: give the directory another name")
    with durable.disk_errors(path, "making the directory"):
        beside = durable.make_new_directory_beside(path)
    try:
        with durable.disk_errors(path, "writing the directory"), _in_one_process():
            dcp.save(content, storage_writer=_Writer(beside), no_dist=True)
            beside.rename(path)
            durable.fsync_dir(path.parent)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


@contextlib.contextmanager
def _in_one_process() -> Iterator[None]:
    """Context manager that hides torch's warning about a missing process group and raises the original error."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except dcp.CheckpointException as error:
            raise next(failure for failure, _ in error.failures.values()) from None


class _Writer(dcp.FileSystemWriter):
    def storage_meta(self) -> index.StorageMeta:
        """Return the metadata without the local path that torch would record."""
        return index.StorageMeta(save_id=self.save_id)


# --- reading ----------------------------------------------------------------------------------------------------------


def load_into(state: ObjectState, path: Path, names: Sequence[str] | None = None) -> None:
    """Implement :func:`samebits.elastic.load_dcp`."""
    if state.is_running:
        raise UsageError("samebits.elastic.load_dcp: the job has begun; call it before samebits.elastic.run")
    wanted = list(state.handlers if names is None else names)
    unknown = sorted(set(wanted) - state.handlers.keys())
    if unknown:
        raise UsageError(f"load_dcp(names=…): the state has no {', '.join(unknown)}; it has {sorted(state.handlers)}")
    found = read_dcp(path)
    origin = found.get(ORIGIN)
    if isinstance(origin, dict):
        found = {**{name: {} for name in origin.get("values", ())}, **found}  # the format drops empty dictionaries
    missing = [name for name in wanted if name not in found]
    if missing:
        raise CheckpointError(
            f"{path} holds {sorted(found)} and lacks {', '.join(missing)}. Fix: name what to load from it, as in "
            f"load_dcp(state, path, names={sorted(found.keys() & state.handlers.keys())})"
        )
    before = rng.capture()
    try:
        state.load_values({name: _shaped_as(state.handlers[name].contents(), found[name]) for name in wanted}, {})
    except (KeyError, RuntimeError, TypeError, ValueError) as error:  # what load_state_dict raises
        raise CheckpointError(f"{path} holds another program's state: {' '.join(str(error).split())}") from error
    rng.restore(before)
    whence = f", step {origin.get('step')} of job {origin.get('job')}" if isinstance(origin, dict) else ""
    log.say(f"begins with {', '.join(wanted)} from {path}{whence}")


def read_dcp(path: Path) -> dict[str, Any]:
    """Return everything in the directory, nested as it was saved; dictionary keys are strings.

    Raises:
        CheckpointError: ``path`` is not such a directory, or a value cannot be read without running code from it.
    """
    reader = SafeReader(path)
    found = reader.read_metadata()
    flat: dict[str, Any] = {
        name: torch.empty(one.size, dtype=one.properties.dtype)
        if isinstance(one, index.TensorStorageMetadata)
        else None
        for name, one in found.state_dict_metadata.items()
    }
    try:
        with _in_one_process():
            dcp.load(flat, storage_reader=reader, planner=SafePlanner(), no_dist=True)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except Exception as error:  # a damaged file may raise anything
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    places = found.planner_data or {}
    nested: dict[Any, Any] = {}
    for name, value in flat.items():
        *above, last = places.get(name) or (name,)
        inner = nested
        for key in above:
            inner = inner.setdefault(key, {})
        inner[last] = value
    result: dict[str, Any] = _with_lists(nested)
    return result


def _with_lists(tree: Any) -> Any:
    """Convert dictionaries with integer keys, as which the format stores lists, back to lists."""
    if not isinstance(tree, dict):
        return tree
    if tree and all(type(key) is int for key in tree):
        return [_with_lists(tree[key]) for key in sorted(tree)]
    return {key: _with_lists(item) for key, item in tree.items()}


def _shaped_as(live: Any, read: Any) -> Any:
    """Restore from ``live`` what the format cannot represent: keys that are not strings, and empty dictionaries."""
    if not isinstance(read, dict) or (live is not None and not isinstance(live, Mapping)):
        if isinstance(read, list) and isinstance(live, list | tuple) and len(live) == len(read):
            return type(live)(_shaped_as(one, item) for one, item in zip(live, read, strict=True))
        return deque(read, live.maxlen) if isinstance(read, list) and isinstance(live, deque) else read
    live = {} if live is None else live
    are_numbers = all(type(key) is int for key in live) and all(key.isdecimal() for key in read)
    items = {(int(key) if are_numbers else key): item for key, item in read.items()}
    shaped = {key: _shaped_as(live.get(key), item) for key, item in items.items()}
    shaped |= {key: {} for key, one in live.items() if key not in shaped and isinstance(one, Mapping)}
    return shaped if value_trees.children(live) is None else value_trees.rebuilt(live, list(shaped.items()))
