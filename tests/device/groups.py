"""``python groups.py COUNT [DEVICE]``: form, use and break a group of one this often on the device; report leaks.

A separate process, so that all its resources belong to its groups. The last line is JSON: the descriptors, threads,
resident and device memory, and names in /dev/shm that the process held after the first cycles and after the last one.

``python groups.py connecting [DEVICE]``: break a group while it connects to a peer that is gone. The last line is JSON:
the seconds until the connecting rank returned. If the break cannot be carried out (NCCL's communicators hold the lock
that the abort needs), the process ends with the status of ``AbortHungError`` or ``StuckError`` instead.
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
from typing import Any

import torch
import torch.distributed as dist

from samebits.errors import GenerationEndedError
from samebits.training.group import device as devices
from samebits.training.group.group import Exchange, Group, form_alone, is_communication_failure
from samebits.training.run import stuck_collective
from tests.device.script import memory_bytes
from tests.system.cycles import Holding, holding_of

WARM = 10
"""After this many, one-time allocations have been made."""
SETTLED_WITHIN_S = 60.0


def cycle(device: torch.device) -> str:
    """Form, reduce, break; a later collective must fail like a lost peer's, and the device keep working.

    Return the backend.
    """
    group = form_alone(device)
    backend = dist.get_backend()
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
    return backend


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
    """Return the seconds from the break until a rank whose peer has left after giving its address returns.

    NCCL's non-blocking communicators connect in the background, so the rank may only notice in its first collective.
    """
    meeting = Meeting(2)
    ranks = [Group(device, rank, 2, meeting.of(rank), name="a test") for rank in range(2)]
    for one in ranks:
        one.begin()
    is_busy = devices.busy_watch(device)
    break_guarded = stuck_collective.guarded(ranks[0].break_, lambda: ranks[0].is_cut, is_busy=is_busy)
    broken_s: list[float] = []

    def break_it() -> None:
        while not dist.is_initialized():  # then it is about to connect, or connecting
            time.sleep(0.01)
        time.sleep(0.5)
        broken_s.append(time.monotonic())
        break_guarded("a test")

    threading.Thread(target=break_it, daemon=True).start()
    try:
        ranks[0].form()
        dist.all_reduce(torch.ones(4, device=device))
        devices.settle(device)
    except Exception as error:
        if not isinstance(error, GenerationEndedError) and not is_communication_failure(error):
            raise
        assert broken_s, f"the rank returned before the group was broken: {error}"
        return time.monotonic() - broken_s[0]
    finally:
        stuck_collective.left()
        ranks[1].drop()
    raise AssertionError("a group without its peer was formed, and has added up")


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
    return asdict(settled()) | {
        "device_bytes": memory_bytes(device),
        "card_kib": used_of_card(device) // 1024,
        "names": names,
    }


def used_of_card(device: torch.device) -> int:
    """Return the bytes of the card's memory in use by all processes; NCCL's own are not in torch's count."""
    module: Any = torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):
        return 0
    free, total = module.mem_get_info(device)
    return int(total - free)


def main() -> None:
    device = devices.choose_device(sys.argv[2] if len(sys.argv) > 2 else None, 0)
    if sys.argv[1] == "connecting":
        print(json.dumps({"left_s": break_while_it_connects(device), "backend": devices.backend_of(device)}))
        return
    count = int(sys.argv[1])
    for _ in range(WARM):
        cycle(device)
    before = held(device)
    began_s = time.monotonic()
    for _ in range(count):
        backend = cycle(device)
    each_s = (time.monotonic() - began_s) / count
    print(json.dumps({"each_s": each_s, "before": before, "after": held(device), "backend": backend}))


if __name__ == "__main__":
    main()
