"""Measure how long a checkpoint blocks training, how long until it is durable, and how long a load takes.

``python -m benchmarks.checkpoint [--quick] [--size 64MB 512MB 2GB] [--directory FOLDER] [--device cuda]``. One process
holds a state of that size (parameters and two Adam moments in 400 tensors) and saves and loads it in each way in turn:
the floors (a copy into memory that was touched before; the same bytes written and synced), ``torch.save``, safetensors,
torch.distributed.checkpoint (DCP) plain and asynchronous, and SameBits. The order rotates, the first round is a
warm-up, and a ratio is the median of the ratios within one round, so that other load on the machine affects both sides
alike. One thread computes and copies. A load of SameBits uses as many cores as there are per rank of the host (here
all, up to eight), because no rank trains meanwhile.

- *blocked*: until training may continue; SameBits: ``state.commit()`` with a save, minus one without. ÷ memcpy.
- *durable*: until everything is on disk, synced and under its name; SameBits: until ``state.flush()`` returns.
  ÷ write + fsync.
- *load*: the last save, still in the page cache, into existing tensors; SameBits: verified. ÷ memcpy.
- *memory*: ``state.restore()`` of a copied commit. ÷ memcpy.
- *steps*: of a small model that trains in the same process while a save is written ÷ the same before and after it;
  *spare*: with unused cores, *shared*: training and writing on one core. Its floor: the same while another process
  only writes and syncs as many bytes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.checkpoint_report import (
    CORES,
    GIB,
    MIB,
    TRAINING,
    Sample,
    Samples,
    people,
    report,
    size_in_bytes,
)
from benchmarks.processes import Job, Stage, worker_name
from benchmarks.report import SAFETENSORS_NEEDS, Progress

SIZES = ("64MB", "512MB", "2GB")
SIZES_QUICK = ("64MB",)
DEVICES = ("cpu", "cuda", "npu")
ROUNDS = 7
ROUNDS_QUICK = 5
WITHIN_S = 600.0

# The largest number of copies of the state on disk or in memory: two points and one being written, and a file of each
# other way; the tensors, their copies by memcpy and by DCP's stager, SameBits' two slots and two commits.
DISK_STATES = 9
MEMORY_STATES = 7
SHARED_MEMORY_STATES = 2
SPARE_BYTES = 256 * MIB


def order(ways: Sequence[str], number: int) -> list[str]:
    """Return the order of round ``number``; each round starts with the next contestant."""
    begin = number % len(ways)
    return [*ways[begin:], *ways[:begin]]


# --- available space --------------------------------------------------------------------------------------------------


def too_small(state_bytes: int, free: Mapping[str, int]) -> list[str]:
    """Return the places with too little space for a state of that size, and how much each needs.

    Args:
        state_bytes: the size of the largest state.
        free: free bytes of ``disk``, ``memory`` and ``/dev/shm``.
    """
    states = {"disk": DISK_STATES, "memory": MEMORY_STATES, "/dev/shm": SHARED_MEMORY_STATES}
    needed = {place: count * state_bytes + SPARE_BYTES for place, count in states.items()}
    return [
        f"{place}: {free[place] / GIB:.1f} GiB are free, {needed_bytes / GIB:.1f} GiB are needed"
        for place, needed_bytes in needed.items()
        if free[place] < needed_bytes
    ]


def free_bytes(directory: Path) -> dict[str, int]:
    """Return the free space in the form of :func:`too_small`."""
    memory = re.search(r"^MemAvailable:\s+(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    assert memory is not None, "proc(5): MemAvailable"
    return {
        "disk": shutil.disk_usage(directory).free,
        "memory": int(memory[1]) * 1024,
        "/dev/shm": shutil.disk_usage("/dev/shm").free,
    }


def is_in_memory(directory: Path) -> bool:
    """Return whether that folder is in memory, by the longest mount point above it (proc(5), mountinfo)."""
    kinds: dict[Path, str] = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        kinds[Path(left.split()[4])] = right.split()[0]
    place = next(path for path in (directory, *directory.parents) if path in kinds)
    return kinds[place] in ("tmpfs", "ramfs")


# --- the run ----------------------------------------------------------------------------------------------------------


class Worker:
    """The only worker of a job, controlled line by line."""

    def __init__(self, stage: Stage, state_bytes: int, device: str) -> None:
        self._stage = stage
        self._answers = 0
        folder = stage.folder / "ways"
        folder.mkdir()
        # Some peers hold the interpreter for seconds at 2 GB, during which our agent cannot send.
        job = Job(stage, "checkpoint", world_size=1, NODE_TIMEOUT="60", DEVICE=device)
        job.start_scheduler()
        self._process = job.start_worker(0, str(state_bytes), str(folder), device, gated=True)
        stage.channel.wait_for(lambda: bool(stage.channel.select("ready")), WITHIN_S, "the worker's beginning")
        self.ways: list[str] = json.loads(stage.channel.select("ready")[0].text or "")

    def ask(self, *words: str) -> Sample:
        """Carry out a command; return how long it took."""
        self._tell(" ".join(words))
        self._answers += 1
        channel = self._stage.channel
        channel.wait_for(lambda: len(channel.select("done")) == self._answers, WITHIN_S, repr(" ".join(words)))
        answer: Sample = json.loads(channel.select("done")[-1].text or "")
        return answer

    def end(self) -> None:
        """Let the job finish, so that it leaves nothing behind in memory."""
        self._tell("end")
        self._stage.wait(worker_name(0), WITHIN_S)

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())
        self._process.stdin.flush()


def measure(size: str, rounds: int, directory: Path, device: str, progress: Progress) -> Samples:
    """Measure all phases with one state, in one process, on one kind of device."""
    samples = Samples()
    with Stage(within=directory) as stage:
        worker = Worker(stage, size_in_bytes(size), device)
        progress.say(f"{size}: the job runs, its state on {device}, with {', '.join(worker.ways)}")

        def all_of(ways: Sequence[str]) -> list[str]:
            return [way for way in ways if way in worker.ways]

        def go_round(found: dict[str, list[Sample]], ask: Callable[[str], Sample], shown: str) -> None:
            ways = all_of(list(found))
            for number in range(rounds + 1):
                for way in order(ways, number):
                    sample = ask(way)
                    if number:
                        found[way].append(sample)
            progress.say(f"{size}: {rounds} rounds of {shown}")

        go_round(samples.saves, lambda way: worker.ask("save", way), "saving")
        go_round(samples.loads, lambda way: worker.ask("load", way), "loading")
        for _ in range(rounds):
            for way in all_of(TRAINING):
                for cores in CORES:
                    samples.training[way, cores].append(worker.ask("train", way, cores))
        progress.say(f"{size}: {rounds} rounds of training while saving")
        go_round(samples.memory, lambda way: worker.ask("load", way), "restoring from memory")
        worker.end()
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.checkpoint", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help=f"measure only {SIZES_QUICK[0]}, in {ROUNDS_QUICK} rounds")
    parser.add_argument("--size", nargs="+", help=f"sizes of the state (default: {' '.join(SIZES)})")
    parser.add_argument("--rounds", type=int, help=f"number of rounds (default: {ROUNDS})")
    parser.add_argument(
        "--directory",
        type=Path,
        default=Path(),
        help="folder on the disk to measure; created files are removed (default: the current folder)",
    )
    parser.add_argument("--device", choices=DEVICES, default="cpu", help="device that holds the state (default: cpu)")
    arguments = parser.parse_args()
    sizes: Sequence[str] = arguments.size or (SIZES_QUICK if arguments.quick else SIZES)
    directory = arguments.directory.resolve()
    try:
        largest = max(map(size_in_bytes, sizes))
    except ValueError as error:
        parser.error(str(error))
    if is_in_memory(directory):
        parser.error(f"{directory} lies in memory (tmpfs), not on a disk: name another one with --directory")
    if found := too_small(largest, free_bytes(directory)):
        parser.error(f"too little room in {directory}: {'; '.join(found)}; free some, or name a smaller --size")
    rounds = arguments.rounds or (ROUNDS_QUICK if arguments.quick else ROUNDS)
    lacking = {} if importlib.util.find_spec("safetensors") else {"safetensors": SAFETENSORS_NEEDS}
    progress = Progress(f"a state of {', '.join(sizes)} on {arguments.device}, {rounds} rounds of everything", lacking)
    measured = {size: measure(size, rounds, directory, arguments.device, progress) for size in sizes}
    report(measured).print(people(measured))


if __name__ == "__main__":
    main()
