"""Really full and really read-only disks: ``python -m tests.crash_points.real_disks <folder>``.

It mounts small in-memory file systems on the folder, so it must run in a mount namespace of its own (unshare(1)). Each
scenario then meets a disk with 0, 1, 2, … free blocks, with 0, 1, 2, … free inodes, and one that was remounted
read-only. It prints violations as lines of JSON, and finally the number of attempts and their outcomes.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from samebits.errors import StoreError
from tests.crash_points.points import Violation, judge, judge_text
from tests.crash_points.scenarios import SCENARIOS, files_of

DISK_BYTES, DISK_INODES = 256 * 1024, 128
MOST_LEFT = 9  # more than any scenario needs: the last attempt succeeds
_BLOCK_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Refusal:
    """``begin`` makes the disk refuse, and returns what ``end``s that; ``at`` is how much is left."""

    reason: str
    name: str
    at: int
    begin: Callable[[Path, int], Callable[[], None]]


def fill_blocks(disk: Path, left: int) -> Callable[[], None]:
    """Leave this many blocks; a block may be kept back for a folder's needs."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(_BLOCK_BYTES))
    os.truncate(ballast, max(0, ballast.stat().st_size - left * _BLOCK_BYTES))
    return ballast.unlink


def fill_inodes(disk: Path, left: int) -> Callable[[], None]:
    """Leave this many inodes: files and folders that can still be made."""
    made: list[Path] = []
    with contextlib.suppress(OSError):
        while True:
            (path := disk / f"filler-{len(made)}").touch()
            made.append(path)
    for path in made[len(made) - left :]:
        path.unlink()
    return lambda: [path.unlink(missing_ok=True) for path in made] and None


def remount_read_only(disk: Path, _: int) -> Callable[[], None]:
    _run("mount", "-o", "remount,ro", str(disk))
    return lambda: _run("mount", "-o", "remount,rw", str(disk))


REFUSALS = (
    *(Refusal("ENOSPC", "blocks left", left, fill_blocks) for left in range(MOST_LEFT)),
    *(Refusal("ENOSPC", "inodes left", left, fill_inodes) for left in range(MOST_LEFT)),
    Refusal("EROFS", "read-only", 0, remount_read_only),
)


def attempt(disk: Path, name: str, refusal: Refusal, endings: Counter[str]) -> Iterator[str]:
    """Run one scenario on one such disk."""
    scenario, folder = SCENARIOS[name], disk / "work"
    folder.mkdir()
    scenario.prepare(folder)
    before, promised = files_of(folder), [0]
    end = refusal.begin(disk, refusal.at)
    ended = "succeeded"
    try:
        scenario.act(folder, promised.append)
    except StoreError as error:
        ended = refusal.reason
        yield from judge_text(str(error), folder, refusal.reason)
    except Exception:
        yield f"no error of ours:\n{traceback.format_exc()}"
    endings[f"{refusal.name}: {ended}"] += 1
    end()
    yield from judge(scenario, before, folder, promised[-1])


def main(disk: Path) -> None:
    endings: Counter[str] = Counter()
    for name in SCENARIOS:
        for refusal in REFUSALS:
            _run("mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES},nr_inodes={DISK_INODES},mode=700", "disk", str(disk))
            for what in attempt(disk, name, refusal, endings):
                violation = Violation(name, refusal.name, str(refusal.at), what)
                print(json.dumps({"violation": str(violation)}), flush=True)
            _run("umount", "--lazy", str(disk))  # a lock that the failed attempt left may still be open
    print(json.dumps({"endings": endings}))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
