"""``python -m tests.device.breaks CASE``: one way in which breaking a group goes wrong on the simulated device.

Each case is a process of its own, because a device, a group and a watchdog belong to a process. ``test_breaks`` has
what each case must come to.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import samebits
from samebits.errors import GenerationEndedError, UsageError
from samebits.training import torch_private
from samebits.training.group import device as devices
from samebits.training.group import gloo, transfer
from samebits.training.group.breakable_group import BreakableGroup
from samebits.training.group.breaker import Breaker
from samebits.training.group.calling_place import PACKAGE_FOLDER
from samebits.training.group.group import Group, form_alone, is_communication_failure
from samebits.training.process import context
from samebits.training.process.device_view import DeviceView, wait_for_memory
from samebits.training.run import stuck_collective
from tests.device import backend
from tests.device.groups import Meeting
from tests.device.script import sha256_of

BREAK_RETURNS_WITHIN_S = 2.0
QUEUED_S = 6 * stuck_collective.STUCK_LOOKS * stuck_collective.LOOK_EVERY_S
"""Longer than a thread may be at rest in a collective."""
WAITING = ("synchronize", "item", "tolist", "cpu", "query", "empty", "clone", "to", "copy_")
"""Names of calls that may wait for the device, or allocate on it."""
FIRST_STEPS, STEPS_EACH = 7, 3
"""After the first steps, commits are no longer looked at for changes of the weights."""


def undefined() -> None:
    """A result that is read after an abort may be any bytes."""
    device = torch.device(backend.NAME, 0)
    group = form_alone(device)
    finish = transfer.begin_gather(7, device)
    assert finish() == [7], "before the break a result is what was sent"
    torch.get_device_module(device).hold_collectives(True)
    finish = transfer.begin_gather(7, device)
    group.break_("a test")
    try:
        print("read", finish())
    except GenerationEndedError:
        print("refused")


def hanging_abort() -> None:
    """Breaking returns though the abort does not, and the process ends with a status of its own."""
    group = form_alone(torch.device(backend.NAME, 0))
    began_s = time.monotonic()
    group.break_("a test")
    print("returned", time.monotonic() - began_s < BREAK_RETURNS_WITHIN_S, flush=True)
    group.drop()
    print("dropped", flush=True)


def several_groups() -> None:
    """The abort of each group waits for the collectives of all groups of the process, as NCCL's does."""
    device = torch.device(backend.NAME, 0)
    group = form_alone(device)
    pgs = [dist.group.WORLD, dist.new_group([0])]
    for one in pgs:
        dist.all_reduce(torch.ones(4, device=device), group=one)  # connects
    torch.get_device_module(device).hold_collectives(True)
    works = [dist.all_reduce(torch.ones(4, device=device), group=one, async_op=True) for one in pgs]
    group.break_("a test")
    while not group.is_cut:
        time.sleep(0.01)
    print("aborted", len(works), flush=True)


def hanging_item() -> None:
    """The script itself waits for a collective that no abort ends."""
    device = torch.device(backend.NAME, 0)
    group = form_alone(device)
    on_break = stuck_collective.guarded(group.break_, lambda: group.is_cut, is_busy=devices.busy_watch(device))
    torch.get_device_module(device).hold_collectives(True)
    rows = torch.ones(4, device=device)
    dist.all_reduce(rows)
    threading.Timer(0.2, on_break, ("a test",)).start()
    print("read", rows[0].item(), flush=True)


def spinning_launch() -> None:
    """A launch uses a whole core and waits for a peer that is gone, as torch waits for NCCL's group calls."""
    device = torch.device(backend.NAME, 0)
    group = form_alone(device)
    on_break = stuck_collective.guarded(group.break_, lambda: group.is_cut, is_busy=devices.busy_watch(device))
    torch.get_device_module(device).hold_collectives(True)
    threading.Timer(0.2, on_break, ("a test",)).start()
    dist.all_reduce(torch.ones(4, device=device))
    print("left", flush=True)


def locked_communicator() -> None:
    """A launch waits for a peer that never connects, and holds the lock that the abort needs."""
    device, meeting = torch.device(backend.NAME, 0), Meeting(2)
    ranks = [Group(device, rank, 2, meeting.of(rank), name="a test") for rank in range(2)]
    for one in ranks:
        one.begin()
    ranks[0].form()
    on_break = stuck_collective.guarded(ranks[0].break_, lambda: ranks[0].is_cut, is_busy=devices.busy_watch(device))
    threading.Timer(0.2, on_break, ("a test",)).start()
    dist.all_reduce(torch.ones(4, device=device))
    print("left", flush=True)


def alone() -> None:
    """A job of one process: its current device, what a commit and a CUDA graph may hold."""
    torch.accelerator.set_device_index(torch.accelerator.device_count() - 1)
    samebits.init()
    print("on", torch.accelerator.current_device_index())
    device = torch.device(backend.NAME, 0)
    model = DistributedDataParallel(torch.nn.Linear(2, 1, device=device), device_ids=[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    every_step = samebits.CheckpointConfig(save_checkpoint_steps=1)
    state = samebits.elastic.TorchState(model, optimizer, step=0, checkpoint=every_step)
    module: Any = torch.get_device_module(device)
    rows, breaks = torch.ones(2, 2, device=device), [2]

    def refused(name: str, call: Callable[[], object]) -> None:
        module.captures = True
        try:
            call()
        except UsageError as error:
            print(name, "refused", "Fix:" in str(error), flush=True)
        finally:
            module.captures = False

    @samebits.elastic.run
    def train(state: samebits.elastic.TorchState) -> None:
        print("from", state.step, flush=True)
        while state.step < 3:
            refused("forward", lambda: model(rows))
            model(rows).sum().backward()
            refused("step", optimizer.step)
            optimizer.step()
            state.step += 1
            if [state.step] == breaks:
                breaks.clear()
                group = context.current("a test").group
                assert group is not None
                group.break_("a test")  # a peer is lost between a step and its commit
            state.commit()

        if state.step == 3:
            graphs_hold_no_collective(module, rows)

    train(state)
    print("ended at", state.step)


def graphs_hold_no_collective(module: Any, rows: torch.Tensor) -> None:
    """A collective of the script's own is refused while a graph is captured, and runs outside."""
    module.captures = True
    try:
        dist.all_reduce(rows)
    except UsageError as error:
        print("collective refused", str(error).startswith("breaks.py:"), "Fix:" in str(error), flush=True)
    finally:
        module.captures = False
    dist.all_reduce(rows)


def long_queue() -> None:
    """A rank whose device is far behind is no hung one, though it is at rest in a read of the script's own."""
    samebits.init()
    device = torch.device(backend.NAME, 0)
    model = torch.nn.Linear(2, 1, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = samebits.elastic.TorchState(model, optimizer, step=0)
    module: Any = torch.get_device_module(device)
    process = context.current("a test")
    slow = [0]

    @samebits.elastic.run
    def train(state: samebits.elastic.TorchState) -> None:
        while state.step < 2:
            loss = model(torch.ones(2, 2, device=device)).sum()
            loss.backward()
            if state.step in slow:
                slow.clear()
                module.sleep(QUEUED_S)
                threading.Timer(0.2, process.agent.on_break, ("a test",)).start()
                print("read", loss.item() == loss.item(), flush=True)
            optimizer.step()
            state.step += 1
            state.commit()

    train(state)
    print("ended at", state.step)


def run_ahead(broken_at: int = 0) -> None:
    """How often the host waits for the device in a step; what a break leaves behind a commit that is still queued.

    Args:
        broken_at: the step of the break; 0 for none.
    """
    samebits.init()
    torch.manual_seed(3)
    device = torch.device(backend.NAME, 0)
    module: Any = torch.get_device_module(device)
    model = DistributedDataParallel(torch.nn.Linear(4, 1, device=device), device_ids=[0])
    total = torch.zeros(4, device=device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    state = samebits.elastic.TorchState(model, optimizer, step=0)
    rows, breaks = torch.ones(2, 4, device=device), [broken_at]

    def group() -> Any:
        return context.current("a test").group

    ways: dict[str, Callable[[], object]] = {
        "nothing": lambda: None,
        "reduces": lambda: dist.all_reduce(total),
        "sends": lambda: group().pg.send([total], 0, 0),
    }

    @samebits.elastic.run
    def train(state: samebits.elastic.TorchState) -> None:
        while state.step < FIRST_STEPS + STEPS_EACH * len(ways):
            way = list(ways)[max(0, state.step - FIRST_STEPS) // STEPS_EACH]
            before = module.waits()
            optimizer.zero_grad()
            model(rows).square().mean().backward()
            optimizer.step()
            state.step += 1
            ways[way]()
            state.commit()
            waited = module.waits() - before
            if [state.step] == breaks:
                breaks.clear()
                group().break_("a test")
            if (state.step - FIRST_STEPS) % STEPS_EACH == 0 and state.step > FIRST_STEPS and not broken_at:
                print(way, waited, flush=True)

    train(state)
    print(sha256_of(model))


def calls_of_a_step() -> None:
    """Count SameBits' own calls in a step, and those that wait for the device, for a model with LAYERS layers."""
    samebits.init()
    device = torch.device(backend.NAME, 0)
    layers = [torch.nn.Linear(4, 4, device=device) for _ in range(int(os.environ["LAYERS"]))]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), device_ids=[0])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    state = samebits.elastic.TorchState(model, optimizer, step=0)
    rows, calls = torch.ones(2, 4, device=device), Counter[str]()

    def count(frame: FrameType, event: str, called: Any) -> None:
        if not frame.f_code.co_filename.startswith(PACKAGE_FOLDER):
            return
        if event == "call":
            calls["calls"] += 1
        elif event == "c_call":
            calls["calls"] += 1
            calls[getattr(called, "__name__", "")] += 1

    @samebits.elastic.run
    def train(state: samebits.elastic.TorchState) -> None:
        while state.step < FIRST_STEPS + STEPS_EACH:
            optimizer.zero_grad()
            loss = model(rows).square().mean()
            if state.step == FIRST_STEPS + 1:
                sys.setprofile(count)
            loss.backward()
            optimizer.step()
            state.step += 1
            state.commit()
            sys.setprofile(None)

    train(state)
    print(json.dumps({"calls": calls["calls"]} | {name: calls[name] for name in WAITING}))


def scaled(broken_at: int = -1) -> None:
    """A GradScaler skips a step, and halves its scale, for the bytes that an aborted collective leaves.

    Args:
        broken_at: the step whose gradients are aborted; -1 for none.
    """
    samebits.init()
    torch.manual_seed(3)
    device = torch.device(backend.NAME, 0)
    module: Any = torch.get_device_module(device)
    model = DistributedDataParallel(torch.nn.Linear(4, 1, device=device), device_ids=[0])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10, growth_interval=2)
    state = samebits.elastic.TorchState(model, optimizer, scaler=scaler, step=0)
    rows, breaks, scales = torch.ones(2, 4, device=device), [broken_at], list[float]()

    @samebits.elastic.run
    def train(state: samebits.elastic.TorchState) -> None:
        module.hold_collectives(False)
        while state.step < 5:
            optimizer.zero_grad()
            loss = model(rows).square().mean()
            if [state.step] == breaks:
                breaks.clear()
                module.hold_collectives(True)
                threading.Thread(target=break_once_launched, args=(context.current("a test"),)).start()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            state.step += 1
            state.commit()

    train(state)
    print(scales.count(2.0**10))
    print(sha256_of(model), scaler.get_scale())


def break_once_launched(process: context.Worker) -> None:
    """Break the process's group as soon as it launches another collective."""
    assert process.group is not None
    before = process.group.launched()
    while process.group.launched() == before:
        time.sleep(0.01)
    process.agent.on_break("a test")


def waiting_pair() -> None:
    """A receive from a peer that is gone ends with the group, or else the process does."""
    device = torch.device(backend.NAME, 0)
    group = form_alone(device)
    on_break = stuck_collective.guarded(group.break_, lambda: group.is_cut, is_busy=devices.busy_watch(device))
    torch.get_device_module(device).hold_collectives(True)
    rows = torch.ones(4, device=device)
    work = group.pg.recv([rows], 0, 0)
    threading.Timer(0.2, on_break, ("a test",)).start()
    try:
        work.wait()
        print("read", rows[0].item(), flush=True)
    except Exception as error:
        print("left", is_communication_failure(error))


def gloo_pair() -> None:
    """Two ranks on one device are connected by gloo, as on a card on which NCCL accepts one rank only."""
    device, store, limit = torch.device(backend.NAME, 0), dist.HashStore(), timedelta(seconds=60)
    with ThreadPoolExecutor(2) as threads:
        meshes = list(threads.map(lambda rank: gloo.connect(store, rank, 2, "127.0.0.1", limit, limit), range(2)))
    pairs = []
    for rank, mesh in enumerate(meshes):
        inner = dist.ProcessGroup(store, rank, 2)
        pairs.append(BreakableGroup(inner, Breaker("a test"), limit, lambda *_: None))
        for one in (inner, pairs[-1]):
            torch_private.dress_group(one, mesh, "1", "a test")
    sent, received = torch.arange(4.0, device=device), torch.zeros(4, device=device)
    works = [pairs[0].send([sent], 1, 0), pairs[1].recv([received], 0, 0)]
    sent.fill_(9.0)  # the copy was made before
    for work in works:
        work.wait()
    print("received", received.tolist(), flush=True)


def streams() -> None:
    """A checkpoint's copies arrive while the training's stream waits for a peer that is gone."""
    device = torch.device(backend.NAME, 0)
    group = form_alone(device)
    rows = torch.ones(4, device=device)
    torch.get_device_module(device).hold_collectives(True)
    dist.all_reduce(torch.ones(4, device=device))
    training = torch.accelerator.current_stream(device)
    waiting = threading.Thread(target=training.synchronize)
    waiting.start()
    while not waiting_in_its_stream(waiting):
        time.sleep(0.01)
    copy, beside = torch.zeros(4), torch.Stream(device)
    with beside:
        copy.copy_(rows, non_blocking=True)
    beside.synchronize()
    print("copied", copy.sum().item(), flush=True)
    group.break_("a test")
    waiting.join()
    print("left", flush=True)


def waiting_in_its_stream(thread: threading.Thread) -> bool:
    """Return whether the thread has come to rest (proc(5), the state in stat)."""
    stat = Path(f"/proc/self/task/{thread.native_id}/stat").read_text()
    return stat[stat.rindex(")") + 2] == "S"


def lost_context(hangs: bool) -> None:
    """A device that fails or hangs in this process alone is found by asking it."""
    device = torch.device(backend.NAME, 0)
    devices.require_sound(device)
    torch.get_device_module(device).lose_context(hangs)
    devices.require_sound(device)


def full_device() -> None:
    """A device without free memory works, and its tests take one stream in all."""
    device = torch.device(backend.NAME, 0)
    module: Any = torch.get_device_module(device)
    before, held = module.streams(), []
    for _ in range(3):
        devices.require_sound(device)
    print("streams", module.streams() - before)
    try:
        while True:
            held.append(torch.empty(1, device=device))
    except torch.OutOfMemoryError:
        devices.require_sound(device)
    print("sound", flush=True)


def late_memory() -> None:
    """A killed predecessor's memory is freed late: the wait is over then, and not before, and is bounded."""
    device, folder = torch.device(backend.NAME, 0), Path.cwd()
    held, note = Path(os.environ["TRIAL_HELD"]), folder / "memory_2.json"
    wanted_bytes = 600 << 20
    DeviceView.noting(note, "a job", "here", device)(wanted_bytes)
    held.write_text(str(900 << 20))
    assert wait_for_memory(note, "another job", "here", device) == 0.0
    assert wait_for_memory(note, "a job", "here", device, within_s=0.3) >= 0.3
    threading.Timer(1.0, held.write_text, ("0",)).start()
    print("waited", wait_for_memory(note, "a job", "here", device) >= 0.5)
    print("got", torch.empty(wanted_bytes, dtype=torch.uint8, device=device).numel() == wanted_bytes)


CASES = {
    "late_memory": late_memory,
    "full_device": full_device,
    "alone": alone,
    "undefined": undefined,
    "hanging_abort": hanging_abort,
    "several_groups": several_groups,
    "hanging_item": hanging_item,
    "locked_communicator": locked_communicator,
    "spinning_launch": spinning_launch,
    "long_queue": long_queue,
    "waiting_pair": waiting_pair,
    "run_ahead": run_ahead,
    "calls_of_a_step": calls_of_a_step,
    "break_behind_a_commit": lambda: run_ahead(FIRST_STEPS + 2),
    "gloo_pair": gloo_pair,
    "streams": streams,
    "scaled": scaled,
    "break_behind_a_scaler": lambda: scaled(2),
    "failing_context": lambda: lost_context(False),
    "hanging_context": lambda: lost_context(True),
}

if __name__ == "__main__":
    backend.register()
    CASES[sys.argv[1]]()
