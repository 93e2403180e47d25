"""``python -m tests.device.breaks CASE``: one way in which breaking a group goes wrong on the device made up for tests.

Each case is a process of its own, because a device, a group and a watchdog belong to a process. ``test_breaks`` has
what each case must come to.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import samebits
from samebits.errors import GenerationEndedError, UsageError
from samebits.training.group import device as devices
from samebits.training.group import transfer
from samebits.training.group.group import form_alone
from samebits.training.process import context
from samebits.training.process.device_view import DeviceView, wait_for_memory
from samebits.training.run import watchdog
from tests.device import backend

BREAK_RETURNS_WITHIN_S = 2.0


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


def hanging_item() -> None:
    """The script itself waits for a collective that no abort ends."""
    device = torch.device(backend.NAME, 0)
    group = form_alone(device)
    on_break = watchdog.guarded(group.break_, lambda: group.is_cut, is_busy=devices.busy_watch(device))
    torch.get_device_module(device).hold_collectives(True)
    rows = torch.ones(4, device=device)
    dist.all_reduce(rows)
    threading.Timer(0.2, on_break, ("a test",)).start()
    print("read", rows[0].item(), flush=True)


def alone() -> None:
    """A job of one process: what a commit and a CUDA graph may hold."""
    samebits.init()
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

    train(state)
    print("ended at", state.step)


def lost_context(hangs: bool) -> None:
    """A device that fails or hangs in this process alone is found by asking it."""
    device = torch.device(backend.NAME, 0)
    devices.require_sound(device)
    torch.get_device_module(device).lose_context(hangs)
    devices.require_sound(device)


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
    "alone": alone,
    "undefined": undefined,
    "hanging_abort": hanging_abort,
    "hanging_item": hanging_item,
    "failing_context": lambda: lost_context(False),
    "hanging_context": lambda: lost_context(True),
}

if __name__ == "__main__":
    backend.register()
    CASES[sys.argv[1]]()
