"""``python peer.py RANK FOLDER``: two ranks connected by the device's own backend; rank 0 waits for rank 1, which dies.

When ``waiting`` is in the folder, the test kills rank 1, then makes ``killed``. Rank 0's last line is JSON: the seconds
from the break until its thread has left the collective, and until the next group has added up.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from samebits.errors import GenerationEndedError
from samebits.training.group import device as devices
from samebits.training.group.group import Group, form_alone, is_communication_failure
from samebits.training.run import stuck_collective

RANKS = 2
LOOK_S = 0.01
IN_THE_KERNEL_S = 0.5
"""After the launch, a kernel that waits for its peer has begun."""


class Meeting:
    """Files through which the ranks exchange their messages."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank

    def publish(self, blob: bytes) -> None:
        part = self._folder / f"part-{self._rank}"
        part.write_bytes(blob)
        part.rename(self._folder / f"rank-{self._rank}")

    def wait(self) -> list[bytes]:
        paths = [self._folder / f"rank-{rank}" for rank in range(RANKS)]
        while not all(path.exists() for path in paths):
            time.sleep(LOOK_S)
        return [path.read_bytes() for path in paths]


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    device = devices.choose_device(None, rank)
    devices.use(device)
    group = Group(device, rank, RANKS, Meeting(folder, rank), name="a test")
    group.form()
    rows = torch.ones(1024, device=device)
    dist.all_reduce(rows)
    assert rows.tolist() == [RANKS] * 1024
    if rank > 0:
        while True:
            time.sleep(1.0)
    on_break = stuck_collective.guarded(group.break_, lambda: group.is_cut, is_busy=devices.busy_watch(device))
    broken_s: list[float] = []

    def break_it() -> None:
        time.sleep(IN_THE_KERNEL_S)
        (folder / "waiting").touch()
        while not (folder / "killed").exists():
            time.sleep(LOOK_S)
        broken_s.append(time.monotonic())
        on_break("a test")

    backend = dist.get_backend()
    threading.Thread(target=break_it, daemon=True).start()
    try:
        dist.all_reduce(rows)
        devices.settle(device)
    except Exception as error:
        if not isinstance(error, GenerationEndedError) and not is_communication_failure(error):
            raise
    assert broken_s, "the collective ended without its peer, before the group was broken"
    left_s = time.monotonic() - broken_s[0]
    stuck_collective.left()
    group.drop()
    devices.require_sound(device)
    form_alone(device)
    rows = torch.ones(8, device=device)
    dist.all_reduce(rows)
    assert float(rows.sum()) == 8
    print(json.dumps({"left_s": left_s, "again_s": time.monotonic() - broken_s[0], "backend": backend}))


if __name__ == "__main__":
    main()
