"""What this worker's host has left, and what the worker uses, read every few seconds in a thread of its own.

Here live the sensors (psutil, the control group's files, statvfs); the device's are ``device_look``'s. Never here: from
when on a number is an ailment, and what follows (``core.watch.health``). The one idea: a disk that hangs must not cost
the seat, so nothing is read in the thread that beats; and who is well says nothing. A host's clock is not compared with
another's: no decision here depends on it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from samebits.config import Look, Settings
from samebits.core.reports import MAX_AILMENTS, Ailment, Figure, HealthReport, Sign
from samebits.core.watch.health import HealthWatch, Limit, Reading, said, unfit
from samebits.errors import PreflightError
from samebits.service.health import device_look
from samebits.service.health.device_look import DeviceLook, DeviceReadings, WatchedDevice
from samebits.store.checkpoint.memory_buffer import taken_share

SHARED_MEMORY = Path("/dev/shm")
DESCRIPTORS_SHARE = 0.9
MAX_PLACES = 8
CPUS_OVER_S = 0.5


def limits_of(settings: Settings) -> dict[Sign, Limit]:
    """The limits that the settings give; a sign that is off has none."""
    chosen = {sign: settings.health.of(sign.name.lower()) for sign in (Sign.CPU, Sign.MEMORY, Sign.DISK)}
    return device_look.limits_in({**chosen, Sign.DESCRIPTORS: Look("tell", DESCRIPTORS_SHARE)})


def places_of(settings: Settings) -> list[Path]:
    """The folders that a job fills: those that are on this host, one of each file system."""
    named = [settings.checkpoint_path, settings.log_dir, settings.recovery_path, SHARED_MEMORY]
    found: dict[int, Path] = {}
    for path in named:
        if isinstance(path, Path):
            with contextlib.suppress(OSError):
                place = nearest(path)
                found.setdefault(place.stat().st_dev, place)
    return list(found.values())[:MAX_PLACES]


def nearest(path: Path) -> Path:
    """The path, or the folder above it that is there already."""
    path = path.absolute()
    return next(one for one in (path, *path.parents) if one.exists())


def may_refuse(settings: Settings) -> bool:
    """Whether any reading keeps this process from asking for a seat."""
    return any(one.refuses for one in (*limits_of(settings).values(), *device_look.limits_of(settings).values()))


def require(settings: Settings, device: WatchedDevice | None) -> None:
    """Look once, before this process asks for a seat.

    Raises:
        PreflightError: a reading whose policy is ``refuse`` is over its limit; the message names all that are.
    """
    limits = {**limits_of(settings), **device_look.limits_of(settings)}
    found = list(readings(places_of(settings), cpus_over_s=CPUS_OVER_S if limits.get(Sign.CPU) else None))
    if device is not None:
        of_device = DeviceReadings(device)
        found += of_device.look()
        of_device.close()
    wrong = unfit(limits, found)
    if wrong:
        node = settings.node_id or "this worker"
        raise PreflightError(
            f"the host of {node} is not well, so it asks for no seat: {'; '.join(map(said, wrong))}. Fix: start it on "
            "another host, or set what the brackets name to tell"
        )


def readings(places: list[Path], cpus_over_s: float | None = None) -> Iterator[Reading]:
    """One look. What cannot be read is left out.

    Args:
        places: the folders whose disks are looked at.
        cpus_over_s: how long the CPUs are watched; None: since the last look, so the first one sees none busy.
    """
    import psutil  # type: ignore[import-untyped]  # in the thread that looks: a start does not wait for it

    yield Reading(Sign.CPU, "", psutil.cpu_percent(cpus_over_s) / 100)
    if (taken := taken_share()) is not None:
        yield Reading(Sign.MEMORY, "", taken)
    for place in places:
        with contextlib.suppress(OSError):
            yield Reading(Sign.DISK, str(place), psutil.disk_usage(str(place)).percent / 100)
    with contextlib.suppress(OSError, psutil.Error):
        process = psutil.Process()
        soft, _ = process.rlimit(psutil.RLIMIT_NOFILE)
        yield Reading(Sign.DESCRIPTORS, "", process.num_fds() / soft)


class HealthLook:
    """Looks every ``interval_s``; reports in this object's threads, at every change and while anything is wrong.

    Args:
        settings: the limits and the folders.
        report: takes all that is wrong, from one thread at a time.
        used: takes, in this object's thread, what the worker uses, in a world that may change its size.
    """

    def __init__(
        self,
        settings: Settings,
        report: Callable[[HealthReport], object],
        used: Callable[[tuple[Figure, ...]], object] = lambda usage: None,
    ) -> None:
        self._interval_s = settings.health.every_s
        self._watch = HealthWatch(limits_of(settings))
        self._settings = settings
        self._report = report
        self._used = used if settings.min_worker_num < settings.max_worker_num else None
        self._over = threading.Event()
        self._device: DeviceLook | None = None
        self._of_device: tuple[Ailment, ...] = ()
        self._one_tells = threading.Lock()

    def start(self) -> None:
        """Begin, in a thread that ends with the process."""
        threading.Thread(target=self._run, name="samebits-health", daemon=True).start()

    def watch_device(self, device: WatchedDevice) -> None:
        """Look at this device as well, once, in another thread: a tool may take long."""
        if self._device is None and device_look.limits_of(self._settings):
            self._device = DeviceLook(self._settings, device, self._take_of_device)
            self._device.start()

    def stop(self) -> None:
        """No further look."""
        self._over.set()
        if self._device is not None:
            self._device.stop()

    def _take_of_device(self, ailments: tuple[Ailment, ...], has_changed: bool) -> None:
        self._of_device = ailments
        if has_changed:
            self._tell()

    def _tell(self) -> None:
        with self._one_tells:  # who comes second says the newer
            self._report(HealthReport((self._watch.ailments + self._of_device)[:MAX_AILMENTS]))

    def _run(self) -> None:
        places: list[Path] | None = None
        usage = Usage()
        while not self._over.wait(self._interval_s):
            if self._used is not None:
                self._used(usage.look())
            places = places_of(self._settings) if places is None else places
            has_changed = self._watch.look(readings(places))
            if has_changed or self._watch.ailments or self._of_device:
                self._tell()


class Usage:
    """What this process uses, by which a world finds its size."""

    def __init__(self) -> None:
        self._before = (time.monotonic(), time.process_time())

    def look(self) -> tuple[Figure, ...]:
        """``cpu``: how many cores its threads have used since the last look; ``memory``: the host's share taken, or of
        its control group's limit."""
        before, now = self._before, (time.monotonic(), time.process_time())
        self._before = now
        elapsed_s = now[0] - before[0]
        found = [Figure("cpu", (now[1] - before[1]) / elapsed_s)] if elapsed_s > 0 else []
        if (taken := taken_share()) is not None:
            found.append(Figure("memory", taken))
        return tuple(found)
