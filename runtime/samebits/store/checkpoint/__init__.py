"""Write, find, verify, read, copy and remove the checkpoints of one rank.

A point is a directory with a safetensors file of the tensors, and a manifest of everything else with a hash of every
chunk of the data. The same two files may first be in a slot of shared memory. The slot survives the process that filled
it, and a separate process writes it to disk. A point gets its name once it is complete, and is returned only after its
hashes have been compared.

This package does not import torch, and does not choose the point to resume from.
"""

from __future__ import annotations

from samebits.store.checkpoint.folder import EntryState as EntryState
from samebits.store.checkpoint.folder import FolderEntry as FolderEntry
from samebits.store.checkpoint.folder import FoundPoint as FoundPoint
from samebits.store.checkpoint.folder import folders_with_points as folders_with_points
from samebits.store.checkpoint.folder import inspect_point as inspect_point
from samebits.store.checkpoint.folder import is_gone as is_gone
from samebits.store.checkpoint.folder import is_prefix as is_prefix
from samebits.store.checkpoint.folder import job_of as job_of
from samebits.store.checkpoint.folder import newest_common_point as newest_common_point
from samebits.store.checkpoint.folder import oldest_step_in as oldest_step_in
from samebits.store.checkpoint.folder import parse_point_name as parse_point_name
from samebits.store.checkpoint.folder import point_in as point_in
from samebits.store.checkpoint.folder import point_name as point_name
from samebits.store.checkpoint.folder import rank_directory as rank_directory
from samebits.store.checkpoint.folder import scan as scan
from samebits.store.checkpoint.folder import survey as survey
from samebits.store.checkpoint.memory_buffer import BufferGoneError as BufferGoneError
from samebits.store.checkpoint.memory_buffer import MemoryBuffer as MemoryBuffer
from samebits.store.checkpoint.memory_room import SHARED_MEMORY as SHARED_MEMORY
from samebits.store.checkpoint.memory_room import MemoryRoom as MemoryRoom
from samebits.store.checkpoint.memory_room import copied_slots as copied_slots
from samebits.store.checkpoint.memory_room import free_rooms as free_rooms
from samebits.store.checkpoint.memory_room import is_being_hashed as is_being_hashed
from samebits.store.checkpoint.memory_room import newest_in_memory as newest_in_memory
from samebits.store.checkpoint.memory_room import points_in_memory as points_in_memory
from samebits.store.checkpoint.memory_room import remove_room as remove_room
from samebits.store.checkpoint.memory_room import rooms_of as rooms_of
from samebits.store.checkpoint.memory_room import sweep as sweep
from samebits.store.checkpoint.point_format import BITS_BY_DTYPE as BITS_BY_DTYPE
from samebits.store.checkpoint.point_format import CHUNK_BYTES as CHUNK_BYTES
from samebits.store.checkpoint.point_format import Manifest as Manifest
from samebits.store.checkpoint.point_format import PointHeader as PointHeader
from samebits.store.checkpoint.point_format import TensorEntry as TensorEntry
from samebits.store.checkpoint.point_format import TensorPart as TensorPart
from samebits.store.checkpoint.point_format import encode_header as encode_header
from samebits.store.checkpoint.point_format import encode_manifest as encode_manifest
from samebits.store.checkpoint.point_format import in_file_order as in_file_order
from samebits.store.checkpoint.point_store import Location as Location
from samebits.store.checkpoint.point_store import PointStore as PointStore
from samebits.store.checkpoint.point_store import StoredPoint as StoredPoint
from samebits.store.checkpoint.point_store import final_location as final_location
from samebits.store.checkpoint.point_store import is_remote as is_remote
from samebits.store.checkpoint.point_store import local_folder as local_folder
from samebits.store.checkpoint.point_store import manifest_of as manifest_of
from samebits.store.checkpoint.point_store import open_point_store as open_point_store
from samebits.store.checkpoint.point_store import slots_in as slots_in
from samebits.store.checkpoint.pruning import Pruned as Pruned
from samebits.store.checkpoint.pruning import Pruning as Pruning
from samebits.store.checkpoint.pruning import Retention as Retention
from samebits.store.checkpoint.pruning import disposable as disposable
from samebits.store.checkpoint.pruning import is_abandoned as is_abandoned
from samebits.store.checkpoint.pruning import prune as prune
from samebits.store.checkpoint.pruning import tellable as tellable
from samebits.store.checkpoint.reading import LoadedPoint as LoadedPoint
from samebits.store.checkpoint.reading import export_tensors as export_tensors
from samebits.store.checkpoint.reading import read as read
from samebits.store.checkpoint.reading import tensor_entries as tensor_entries
from samebits.store.checkpoint.reading import verify as verify
from samebits.store.checkpoint.streaming import MAX_PREFACE_BYTES as MAX_PREFACE_BYTES
from samebits.store.checkpoint.streaming import IncomingPoint as IncomingPoint
from samebits.store.checkpoint.streaming import Outgoing as Outgoing
from samebits.store.checkpoint.streaming import sizes_of as sizes_of
from samebits.store.checkpoint.tree import Tree as Tree
from samebits.store.checkpoint.writer import SaveOutcome as SaveOutcome
from samebits.store.checkpoint.writer import Writer as Writer
from samebits.store.checkpoint.writer import dismiss_waiting as dismiss_waiting
from samebits.store.checkpoint.writer import start_ahead as start_ahead
from samebits.store.checkpoint.writing import write_linked as write_linked
from samebits.store.checkpoint.writing import write_point as write_point
