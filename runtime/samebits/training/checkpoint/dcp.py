"""``torch.distributed.checkpoint`` directories: written from points for any program, read into a state that begins.

Points of ours never are in that format; how a directory is read without running what it holds is ``dcp_index``'s. The
one idea: what goes through is whole, by the names it has in the training script, so the number of ranks on either side
does not matter. The format has no hashes: what is written here was verified, but damage done to the directory
afterwards is noticed by nobody.
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
from samebits.store.checkpoint import Checkpoint
from samebits.training import value_trees
from samebits.training.checkpoint.dcp_index import SafePlanner, SafeReader
from samebits.training.checkpoint.export import ORIGIN, require_readable, values_of
from samebits.training.sharding.whole import whole
from samebits.training.state import rng, snapshot
from samebits.training.state.object_state import ObjectState

__all__ = ["export_dcp", "load_into", "read_dcp"]

# --- writing ----------------------------------------------------------------------------------------------------------


def export_dcp(points: Sequence[Checkpoint], path: Path) -> None:
    """Write one step's state to the new directory ``path``: whole there, or not there.

    A program of any world size reads it with ``torch.distributed.checkpoint.load``: ``model`` and ``optimizer`` are
    these objects' ``state_dict()``, other values are there by their names, and ``samebits`` says where they come from.
    It takes the memory of the whole state twice.

    Args:
        points: of every rank where the state is sharded, verified; else of any one.
        path: of the directory.

    Raises:
        CheckpointError: not every rank's point is there, or the state holds what such a directory cannot give back.
        StoreError: the disk refuses, or there is something of that name already.
    """
    joined = [snapshot.state_in(point.tree, point.tensors) for point in points]
    header = points[0].header
    values = whole(values_of(header, joined[0]), [one["own"].get("shards", {}) for one in joined])
    if ORIGIN in values:
        raise CheckpointError(f"{header.point}: the state has a value called {ORIGIN!r}; call it something else")
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
        raise StoreError(f"{path}: exists already; give the directory another name")
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
    """Torch says nothing of other processes, and what goes wrong is raised as what it is."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except dcp.CheckpointException as error:
            raise next(failure for failure, _ in error.failures.values()) from None


class _Writer(dcp.FileSystemWriter):
    def storage_meta(self) -> index.StorageMeta:
        """Without the path on this machine that torch's own notes."""
        return index.StorageMeta(save_id=self.save_id)


# --- reading ----------------------------------------------------------------------------------------------------------


def load_into(state: ObjectState, path: Path, names: Sequence[str] | None = None) -> None:
    """What :func:`samebits.elastic.load_dcp` does."""
    if state.is_running:
        raise UsageError("samebits.elastic.load_dcp: the job has begun; call it before samebits.elastic.run")
    wanted = list(state.handlers if names is None else names)
    unknown = sorted(set(wanted) - state.handlers.keys())
    if unknown:
        raise UsageError(f"load_dcp(names=…): the state has no {', '.join(unknown)}; it has {sorted(state.handlers)}")
    found = read_dcp(path)
    origin = found.get(ORIGIN)
    if isinstance(origin, dict):
        found = {**{name: {} for name in origin.get("values", ())}, **found}  # an empty dictionary leaves no trace
    missing = [name for name in wanted if name not in found]
    if missing:
        raise CheckpointError(
            f"{path}: holds {sorted(found)} and lacks {', '.join(missing)}: name what is to be taken from there, as in "
            f"load_dcp(state, path, names={sorted(found.keys() & state.handlers.keys())})"
        )
    before = rng.capture()
    try:
        state.load_values({name: _shaped_as(state.handlers[name].contents(), found[name]) for name in wanted}, {})
    except (KeyError, RuntimeError, TypeError, ValueError) as error:  # what load_state_dict raises
        raise CheckpointError(f"{path}: holds another program's state: {' '.join(str(error).split())}") from error
    rng.restore(before)
    whence = f", step {origin.get('step')} of job {origin.get('job')}" if isinstance(origin, dict) else ""
    log.say(f"begins with {', '.join(wanted)} from {path}{whence}")


def read_dcp(path: Path) -> dict[str, Any]:
    """Everything in the directory, nested as it was saved; the keys of dictionaries are texts.

    Raises:
        CheckpointError: it is none, or holds what cannot be read without running its code.
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
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
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
    """What was in a list lies under integers so far; what was in a dictionary, under texts."""
    if not isinstance(tree, dict):
        return tree
    if tree and all(type(key) is int for key in tree):
        return [_with_lists(tree[key]) for key in sorted(tree)]
    return {key: _with_lists(item) for key, item in tree.items()}


def _shaped_as(live: Any, read: Any) -> Any:
    """What was read, with keys that are no texts, and with empty dictionaries: in the format there is neither."""
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
