"""The checkpoint of one rank: what a point is on disk, and how it is saved, found, verified, read, sent and removed.

A point is a directory with a safetensors file of the tensors and a manifest that holds everything else together with a
hash of every chunk of the data. The same two files may lie in a slot of shared memory first, from which a process of
their own writes them out, and where they outlive the death of whoever filled it. Never here: torch, and any decision
about which point is resumed. Callers use the names below; the modules behind them are one step each. The one idea: a
point is written once, under a name it gets only when it is whole, and it is never handed out without its hashes having
been compared.
"""

from __future__ import annotations

from samebits.store.checkpoint.format.manifest import CHUNK_BYTES, Manifest, PointHeader, encode_manifest
from samebits.store.checkpoint.format.safetensors_header import TensorEntry, encode_header, in_file_order
from samebits.store.checkpoint.format.tensor_part import BITS_BY_DTYPE, TensorPart
from samebits.store.checkpoint.format.tree import Tree
from samebits.store.checkpoint.local.folder import (
    is_prefix,
    oldest_step_in,
    parse_point_name,
    point_name,
    rank_directory,
)
from samebits.store.checkpoint.local.packing import pack, pack_state, unpack
from samebits.store.checkpoint.local.pruning import (
    Pruned,
    Pruning,
    Retention,
    disposable,
    is_abandoned,
    prune,
    tellable,
)
from samebits.store.checkpoint.local.reading import Checkpoint, export_tensors, read, tensor_entries, verify
from samebits.store.checkpoint.local.scanning import FoundPoint, inspect_point, point_in, scan
from samebits.store.checkpoint.local.streaming import MAX_PREFACE_BYTES, Incoming, Outgoing, sizes_of
from samebits.store.checkpoint.local.surveying import (
    Entry,
    EntryState,
    folders_with_points,
    is_gone,
    job_of,
    newest_common_point,
    survey,
)
from samebits.store.checkpoint.local.writing import write_linked, write_point
from samebits.store.checkpoint.memory.generator_page import (
    EntryKind,
    PageContent,
    PageEntry,
    PageWriter,
    decode_page,
    orphaned_pages,
    read_page,
)
from samebits.store.checkpoint.memory.memory_buffer import BufferGoneError, MemoryBuffer
from samebits.store.checkpoint.memory.memory_room import (
    SHARED_MEMORY,
    MemoryRoom,
    RoomInUse,
    copied_slots,
    free_rooms,
    is_being_hashed,
    newest_in_memory,
    points_in_memory,
    remove_room,
    rooms_of,
    sweep,
)
from samebits.store.checkpoint.point_store import (
    Found,
    Location,
    PointStore,
    final_location,
    is_remote,
    local_folder,
    manifest_of,
    open_point_store,
    slots_in,
)
from samebits.store.checkpoint.writer import Outcome, Writer, dismiss_waiting, start_ahead

__all__ = [
    "BITS_BY_DTYPE",
    "CHUNK_BYTES",
    "MAX_PREFACE_BYTES",
    "SHARED_MEMORY",
    "BufferGoneError",
    "Checkpoint",
    "Entry",
    "EntryKind",
    "EntryState",
    "Found",
    "FoundPoint",
    "Incoming",
    "Location",
    "Manifest",
    "MemoryBuffer",
    "MemoryRoom",
    "Outcome",
    "Outgoing",
    "PageContent",
    "PageEntry",
    "PageWriter",
    "PointHeader",
    "PointStore",
    "Pruned",
    "Pruning",
    "Retention",
    "RoomInUse",
    "TensorEntry",
    "TensorPart",
    "Tree",
    "Writer",
    "copied_slots",
    "decode_page",
    "dismiss_waiting",
    "disposable",
    "encode_header",
    "encode_manifest",
    "export_tensors",
    "final_location",
    "folders_with_points",
    "free_rooms",
    "in_file_order",
    "inspect_point",
    "is_abandoned",
    "is_being_hashed",
    "is_gone",
    "is_prefix",
    "is_remote",
    "job_of",
    "local_folder",
    "manifest_of",
    "newest_common_point",
    "newest_in_memory",
    "oldest_step_in",
    "open_point_store",
    "orphaned_pages",
    "pack",
    "pack_state",
    "parse_point_name",
    "point_in",
    "point_name",
    "points_in_memory",
    "prune",
    "rank_directory",
    "read",
    "read_page",
    "remove_room",
    "rooms_of",
    "scan",
    "sizes_of",
    "slots_in",
    "start_ahead",
    "survey",
    "sweep",
    "tellable",
    "tensor_entries",
    "unpack",
    "verify",
    "write_linked",
    "write_point",
]
