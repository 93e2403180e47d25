"""Check this process's device, memory and disk before it registers.

All results are exact in any order of summation (small integers in float32), so they need not be compared with those of
another machine. Matrix products are verified with Freivalds' check: (A @ B) @ v equals A @ (B @ v).
"""

from __future__ import annotations

import hashlib
import math
import os
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from samebits.config import Settings
from samebits.core.watch.node_check import NodeTimings
from samebits.errors import PreflightError, StoreError
from samebits.service import log
from samebits.service.health import device_health
from samebits.store import durable
from samebits.training.group.device import choose_device

SIZE = 16 << 20
_PART = 1 << 20


def write_and_read(folder: Path) -> float:
    """Measure the durable write speed of the folder, or of its nearest existing parent, in MB/s.

    Raises:
        StoreError: the folder cannot be written, or the data read differs from the data written.
    """
    there = next((one for one in (folder, *folder.absolute().parents) if one.exists()), folder)
    path, part = there / f".preflight-{uuid.uuid4().hex}", os.urandom(_PART)
    with durable.disk_errors(path, "writing a test file"):
        descriptor = durable.create(path, is_read_too=True)
    try:
        with durable.disk_errors(path, "writing a test file"):
            began_s = time.monotonic()
            for _ in range(SIZE // _PART):
                durable.write_all(descriptor, part)
            os.fsync(descriptor)
            took_s = time.monotonic() - began_s
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.lseek(descriptor, 0, os.SEEK_SET)
            same = all(_digest(_read(descriptor)) == _digest(part) for _ in range(SIZE // _PART))
    finally:
        os.close(descriptor)
        path.unlink(missing_ok=True)
    if not same:
        raise StoreError(f"{folder}: the data read differs from the data written. Fix: check this disk, or use another")
    return SIZE / 1e6 / max(took_s, 1e-9)


def _read(descriptor: int) -> bytes:
    parts, left = [], _PART
    while left and (part := os.read(descriptor, left)):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


MATRIX = 768
PRODUCTS = 4
MEMORY_BYTES = 64 << 20
PATTERNS = (0x5555555555555555, 0x2AAAAAAAAAAAAAAA)


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One check's result; ``problem`` is empty if it passed."""

    what: str
    found: str
    problem: str = ""
    took_s: float = 0.0  # time for the work that is the same in every process


def of_host(settings: Settings) -> Iterator[CheckResult]:
    """Run :func:`looks` for every device of this host that torch sees."""
    first = choose_device(settings.device, 0)
    count = 1 if first.type == "cpu" else torch.accelerator.device_count()
    yield from looks([choose_device(first.type, index) for index in range(count)], settings.checkpoint_path)


def looks(devices: Sequence[torch.device], folder: Path | str) -> Iterator[CheckResult]:
    """Check devices, their memory, the vendor tool's report, and the folder's disk.

    Each check takes one or two seconds.
    """
    for device in devices:
        yield products(device)
        yield memory(device)
    for one in device_health.devices():
        yield CheckResult(one.name, one.found, one.problem)
    if isinstance(folder, Path):
        try:
            speed = write_and_read(folder)
            yield CheckResult("disk", f"{speed:.0f} MB/s are durable in {folder}", took_s=SIZE / 1e6 / speed)
        except StoreError as error:
            yield CheckResult("disk", str(folder), str(error))


def products(device: torch.device) -> CheckResult:
    """Multiply matrices and check each product."""
    draw = torch.Generator().manual_seed(28)
    left, right = (torch.randint(-8, 9, (MATRIX, MATRIX), generator=draw) for _ in range(2))
    vector = torch.randint(-8, 9, (MATRIX, 1), generator=draw)
    expected = left @ (right @ vector)  # integers, on the CPU
    there = left.to(device, torch.float32), right.to(device, torch.float32)
    fastest_s, wrong = math.inf, 0
    for _ in range(PRODUCTS):
        began_s = time.monotonic()
        product = (there[0] @ there[1]).cpu()
        fastest_s = min(fastest_s, time.monotonic() - began_s)
        wrong += not torch.equal(product.to(torch.int64) @ vector, expected)
    found = (
        f"{2 * MATRIX**3 / fastest_s / 1e9:.0f} GFLOP/s in float32, {PRODUCTS - wrong} of {PRODUCTS} products correct"
    )
    problem = f"{wrong} of {PRODUCTS} products were wrong" if wrong else ""
    return CheckResult(f"{device} computes", found, problem, fastest_s)


def memory(device: torch.device) -> CheckResult:
    """Write patterns to a part of the device's memory and read them back."""
    try:
        words = torch.empty(MEMORY_BYTES // 8, dtype=torch.int64, device=device)
    except (RuntimeError, MemoryError) as error:
        return CheckResult(
            f"{device} memory", f"{MEMORY_BYTES >> 20} MiB", f"cannot be allocated ({str(error).splitlines()[0]})"
        )
    places = torch.arange(words.numel(), dtype=torch.int64, device=device)
    wrong, fastest_s = 0, math.inf
    for pattern in PATTERNS:
        began_s = time.monotonic()
        torch.bitwise_xor(places, pattern, out=words)
        wrong += int((words.bitwise_xor_(pattern) != places).sum())
        fastest_s = min(fastest_s, time.monotonic() - began_s)
    found = f"{MEMORY_BYTES >> 20} MiB hold what is written"
    return CheckResult(
        f"{device} memory", found, f"{wrong} words differ from what was written" if wrong else "", fastest_s
    )


def figures(found: Iterable[CheckResult]) -> NodeTimings:
    """Return how many seconds the device, its memory and the disk took, for :mod:`.node_check`."""
    took_s = {one.what.rpartition(" ")[2]: one.took_s for one in found}
    return NodeTimings(took_s["computes"], took_s["memory"], took_s.get("disk", 0.0))


def require(settings: Settings, device: torch.device) -> NodeTimings:
    """Run the checks, log the results, and return the seconds they took.

    Raises:
        PreflightError: a check failed; the message lists all failures.
    """
    began_s = time.monotonic()
    found = list(looks([device], settings.checkpoint_path))
    wrong = [f"{one.what}: {one.problem}" for one in found if one.problem]
    if wrong:
        node = settings.node_id or "this worker"
        raise PreflightError(
            f"the pre-flight check of {node} failed: {'; '.join(wrong)}. Fix: start it on another host, or "
            "without preflight in HEALTH"
        )
    told = "; ".join(f"{one.what}: {one.found}" for one in found)
    log.say(f"pre-flight, {time.monotonic() - began_s:.1f} s: {told}")
    return figures(found)
