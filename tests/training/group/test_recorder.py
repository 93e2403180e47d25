"""The ring of launched collectives: op, number and shape of each, and its completion after a wait."""

from __future__ import annotations

import mmap
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from samebits.store import collective_ring
from samebits.store.collective_ring import _SIZE, CollectiveRing, Launched, LaunchLine, RecordedCollectives, contents_of
from samebits.store.process_identity import ProcessIdentity
from samebits.training.group.group import form_alone
from samebits.training.group.recorder import Recorder

HALF = torch.zeros(2, 3, dtype=torch.float16)
IDS = torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("method", "args", "told"),
    [
        ("allreduce", ([HALF], None), ("all_reduce", (2, 3), "float16", (2, 3), "float16")),
        ("allreduce_coalesced", ([HALF, IDS], None), ("allreduce_coalesced", (10,), "float16", (10,), "float16")),
        ("broadcast", ([IDS],), ("broadcast", (4,), "int64", (4,), "int64")),
        ("allgather", ([[IDS, IDS, IDS]], [IDS], None), ("all_gather", (4,), "int64", (12,), "int64")),
        ("_allgather_base", (IDS, HALF, None), ("_all_gather_base", (2, 3), "float16", (4,), "int64")),
        ("reduce_scatter", ([IDS], [[IDS, IDS]], None), ("reduce_scatter", (8,), "int64", (4,), "int64")),
        ("gather", ([], [IDS], None), ("gather", (4,), "int64", (), "other")),
        ("barrier", (object(),), ("barrier", (), "other", (), "other")),
        ("barrier", (), ("barrier", (), "other", (), "other")),
    ],
)
def test_call_is_recorded_with_op_shapes_and_dtypes(method: str, args: tuple[Any, ...], told: tuple[Any, ...]) -> None:
    memory = mmap.mmap(-1, _SIZE)
    ring = CollectiveRing(memory)
    ring.begin(0, 1)
    recorder = Recorder(ring, "0", "default_pg", [0])
    number = recorder.launched(method, 7, args)
    contents = contents_of(bytes(memory))
    assert contents is not None and number is not None
    one = contents.launched[0]
    assert (one.op, one.input_shape, one.input_dtype, one.output_shape, one.output_dtype) == told
    assert one.sequence == 7 and one.over_ns is None
    recorder.over(number)
    contents = contents_of(bytes(memory))
    assert contents is not None and contents.launched[0].over_ns is not None


def test_nothing_is_recorded_without_a_ring_or_for_an_unknown_method() -> None:
    recorder = Recorder(None, "0", "default_pg", [0])
    assert recorder.launched("allreduce", 1, ([IDS],)) is None
    recorder.over(None)
    assert recorder.launched_pairwise("send", ([IDS], 0, 0)) is None
    recorder.named_sender(None, 0)
    assert Recorder(CollectiveRing(mmap.mmap(-1, _SIZE)), "0", "", [0]).launched("later", 1, ([IDS],)) is None


def test_sends_and_receives_are_counted_per_peer_and_direction() -> None:
    memory = mmap.mmap(-1, _SIZE)
    ring = CollectiveRing(memory)
    ring.begin(1, 6)
    recorder = Recorder(ring, "4", "stages", [1, 3, 5])
    recorder.launched_pairwise("send", ([IDS], 1, 0))
    recorder.launched_pairwise("send", ([IDS], 2, 0))
    recorder.launched_pairwise("send", ([IDS], 1, 9))
    recorder.launched_pairwise("recv", ([HALF], 2, 0))
    number = recorder.launched_pairwise("recv_anysource", ([HALF], 0))
    recorder.named_sender(number, 2)
    recorder.over(number)
    contents = contents_of(bytes(memory))
    assert contents is not None
    line = test_sends_and_receives_are_counted_per_peer_and_direction.__code__.co_firstlineno
    shown = [
        str(one).replace(f" at test_recorder.py:{line + at}, ", " ") for at, one in enumerate(contents.launched, 5)
    ]
    assert shown == [
        "send to rank 3 #1 (int64, 4) in flight",
        "send to rank 5 #1 (int64, 4) in flight",
        "send to rank 3 #2 (int64, 4) in flight",
        "recv from rank 5 #1 (float16, 2 × 3) in flight",
        "recv from rank 5 #2 (float16, 2 × 3) over",
    ]


def mine() -> RecordedCollectives:
    identity = ProcessIdentity.of(os.getpid())
    assert identity is not None
    found = collective_ring.read(identity)
    assert found is not None
    return found


def names(launched: tuple[Launched, ...]) -> list[tuple[str, int, bool]]:
    return [(one.op, one.sequence, one.over_ns is not None) for one in launched]


def test_ring_holds_the_groups_collectives_and_restarts_with_a_new_group() -> None:
    group = form_alone(torch.device("cpu"))
    try:
        dist.all_reduce(torch.zeros(5))
        dist.barrier()
        work = dist.broadcast(torch.zeros(6), 0, async_op=True)
        assert names(mine().launched)[:2] == [("all_reduce", 1, True), ("barrier", 2, True)]
        assert mine().launched[2].input_shape == (6,)
        assert work is not None
        work.wait()
        assert names(mine().launched)[2] == ("broadcast", 3, True)
    finally:
        group.drop()
    group = form_alone(torch.device("cpu"))
    try:
        assert mine().launched == ()
    finally:
        group.drop()


def test_line_is_the_innermost_of_the_script_in_a_backward_pass_too() -> None:
    group = form_alone(torch.device("cpu"))
    try:
        model = DistributedDataParallel(torch.nn.Linear(2, 2))
        places = [place_of_the_last(dist.all_reduce(torch.zeros(5)))]
        loss = model(torch.ones(1, 2)).sum()
        places.append(place_of_the_last(loss.backward()))
    finally:
        group.drop()
    code = test_line_is_the_innermost_of_the_script_in_a_backward_pass_too.__code__
    assert places == [LaunchLine(__file__, code.co_firstlineno + at, code.co_name) for at in (4, 6)]


def place_of_the_last(_: None) -> LaunchLine | None:
    return mine().launched[-1].place
