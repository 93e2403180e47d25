"""``python groups.py COUNT [DEVICE]``: form, use and break a group of one this often on the device; report leaks.

First, one is broken while it connects to a peer that is gone. It is a separate process, so that all its resources
belong to its groups. The last line is JSON: by how much descriptors, threads, resident and device memory, and names in
/dev/shm have grown from the first cycles to the last one.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from samebits.errors import GenerationEndedError
from samebits.training.group import device as devices
from samebits.training.group.group import Exchange, Group, form_alone, is_communication_failure
from tests.device.script import memory_bytes
from tests.system.cycles import Holding, holding_of

TWO_RANKS_IN_A_PROCESS = ("trial", "cuda")
"""Devices on which a second rank can exist without answering: it only gives its address and touches no device."""
WARM = 10
"""After this many, one-time allocations have been made."""
SETTLED_WITHIN_S = 60.0


def cycle(device: torch.device) -> None:
    """Form, reduce, break; a later collective must fail like a lost peer's, and the device keep working."""
    group = form_alone(device)
    rows = torch.ones(1024, device=device)
    dist.all_reduce(rows)
    assert float(rows.sum()) == 1024
    group.break_("a test")
    while not group.is_cut:  # the abort runs in a thread of its own
        time.sleep(0.001)
    try:
        dist.all_reduce(rows)
        devices.settle(device)
    except Exception as error:
        if not is_communication_failure(error):
            raise
    else:
        raise AssertionError("a collective of a broken group did not fail")
    group.drop()
    assert float(torch.ones(8, device=device).sum()) == 8


class Meeting:
    """Where the ranks of one process leave messages for each other."""

    def __init__(self, ranks: int) -> None:
        self._blobs: dict[int, bytes] = {}
        self._all = threading.Barrier(ranks)

    def of(self, rank: int) -> Exchange:
        """Return one rank's side."""
        meeting = self

        class Side:
            def publish(self, blob: bytes) -> None:
                meeting._blobs[rank] = blob
                meeting._all.wait(SETTLED_WITHIN_S)

            def wait(self) -> list[bytes]:
                return [meeting._blobs[one] for one in sorted(meeting._blobs)]

        return Side()


def break_while_it_connects(device: torch.device) -> float:
    """A peer has given its address and is gone: return the seconds from the break until the connecting rank returns."""
    meeting = Meeting(2)
    ranks = [Group(device, rank, 2, meeting.of(rank), name="a test") for rank in range(2)]
    for one in ranks:
        one.begin()
    broken_s: list[float] = []

    def break_it() -> None:
        while not dist.is_initialized():  # then it is about to connect, or connecting
            time.sleep(0.01)
        time.sleep(0.5)
        broken_s.append(time.monotonic())
        ranks[0].break_("a test")

    threading.Thread(target=break_it, daemon=True).start()
    try:
        ranks[0].form()
    except GenerationEndedError:
        return time.monotonic() - broken_s[0]
    finally:
        ranks[1].drop()
    raise AssertionError("a group without its peer was formed")


def settled() -> Holding:
    """Wait until dropped groups have been freed."""
    gc.collect()
    deadline, before = time.monotonic() + SETTLED_WITHIN_S, holding_of(_PID)
    while time.monotonic() < deadline:
        time.sleep(0.5)
        now = holding_of(_PID)
        if (now.descriptors, now.threads) == (before.descriptors, before.threads):
            return now
        before = now
    return before


_PID = int(Path("/proc/self").resolve().name)


def held(device: torch.device) -> dict[str, int]:
    """Return what the process holds, by name, with the names of NCCL's segments or of their stand-ins."""
    names = len(list(Path(os.environ.get("TRIAL_SHARED_MEMORY", "/dev/shm")).glob("nccl-*")))
    return asdict(settled()) | {"device_bytes": memory_bytes(device), "names": names}


def main() -> None:
    count, device = int(sys.argv[1]), devices.choose_device(sys.argv[2] if len(sys.argv) > 2 else None, 0)
    for _ in range(WARM):
        cycle(device)
    left_s = break_while_it_connects(device) if device.type in TWO_RANKS_IN_A_PROCESS else None
    early = held(device)
    began_s = time.monotonic()
    for _ in range(count):
        cycle(device)
    each_s = (time.monotonic() - began_s) / count
    late = held(device)
    print(json.dumps({"left_s": left_s, "each_s": each_s, "grown": {name: late[name] - early[name] for name in early}}))


if __name__ == "__main__":
    main()
