"""Monitor the worker's host and the worker's usage every few seconds, in its own thread.

The sensors are psutil, the control group's files and statvfs. Nothing is read in the thread that sends heartbeats,
because a hanging disk must not cost the worker its seat. A healthy worker sends no report.
``core.watch.health_limits`` has the limits.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from samebits.config import Settings, SignPolicy
from samebits.core.reports import MAX_AILMENTS, Ailment, Figure, HealthReport, Sign
from samebits.core.watch.health_limits import HealthReading, HealthWatch, Limit, said, unfit
from samebits.errors import PreflightError
from samebits.service.health import device_look
from samebits.service.health.device_look import DeviceLook, DeviceReadings, WatchedDevice
from samebits.store.checkpoint.memory_buffer import taken_share

SHARED_MEMORY = Path("/dev/shm")
DESCRIPTORS_SHARE = 0.9
MAX_PLACES = 8
CPUS_OVER_S = 0.5
MIB = 1 << 20


def limits_of(settings: Settings) -> dict[Sign, Limit]:
    """Return the limits in the settings. A disabled check has none."""
    chosen = {sign: settings.health.of(sign.name.lower()) for sign in (Sign.CPU, Sign.MEMORY, Sign.DISK)}
    logs = settings.health.of("logs")
    chosen[Sign.LOGS] = SignPolicy(logs.policy, _scarcity(logs.limit * MIB))
    return device_look.limits_in({**chosen, Sign.DESCRIPTORS: SignPolicy("tell", DESCRIPTORS_SHARE)})


def _scarcity(free_bytes: float) -> float:
    return 1024 * MIB / max(free_bytes, 1.0)


def places_of(settings: Settings) -> list[Path]:
    """Return the folders to which a job writes, one for each local file system."""
    named = [settings.checkpoint_path, settings.log_dir, settings.recovery_path, SHARED_MEMORY]
    found: dict[int, Path] = {}
    for path in named:
        if isinstance(path, Path):
            with contextlib.suppress(OSError):
                place = nearest(path)
                found.setdefault(place.stat().st_dev, place)
    return list(found.values())[:MAX_PLACES]


def nearest(path: Path) -> Path:
    """Return the path, or its nearest existing parent."""
    path = path.absolute()
    return next(one for one in (path, *path.parents) if one.exists())


def may_refuse(settings: Settings) -> bool:
    """Return whether any reading can keep this process from asking for a seat."""
    return any(one.refuses for one in (*limits_of(settings).values(), *device_look.limits_of(settings).values()))


def require(settings: Settings, device: WatchedDevice | None) -> None:
    """Check the host once, before this process asks for a seat.

    Raises:
        PreflightError: a reading with policy ``refuse`` exceeds its limit; the message names all of them.
    """
    limits = {**limits_of(settings), **device_look.limits_of(settings)}
    cpus_over_s = CPUS_OVER_S if limits.get(Sign.CPU) else None
    found = list(readings(places_of(settings), cpus_over_s, settings.log_dir))
    if device is not None:
        of_device = DeviceReadings(device)
        found += of_device.look()
        of_device.close()
    wrong = unfit(limits, found)
    if wrong:
        node = settings.node_id or "this worker"
        raise PreflightError(
            f"the host of {node} is not healthy, so it does not register: {'; '.join(map(said, wrong))}. Fix: start it "
            "on another host, or set the checks in brackets to `tell`"
        )


def readings(
    places: list[Path], cpus_over_s: float | None = None, log_dir: Path | None = None
) -> Iterator[HealthReading]:
    """Yield one round of readings, without unavailable ones.

    Args:
        places: the folders whose disks are read.
        cpus_over_s: how long to watch the CPUs; None to measure since the last round, so that the first round shows no
            busy CPU.
        log_dir: the folder of the logs, if there is one.
    """
    import psutil  # type: ignore[import-untyped]  # slow to import, so not at start

    yield HealthReading(Sign.CPU, "", psutil.cpu_percent(cpus_over_s) / 100)
    if (taken := taken_share()) is not None:
        yield HealthReading(Sign.MEMORY, "", taken)
    for place in places:
        with contextlib.suppress(OSError):
            yield HealthReading(Sign.DISK, str(place), psutil.disk_usage(str(place)).percent / 100)
    if log_dir is not None:
        with contextlib.suppress(OSError):
            yield HealthReading(
                Sign.LOGS, str(log_dir.absolute()), _scarcity(psutil.disk_usage(str(nearest(log_dir))).free)
            )
    with contextlib.suppress(OSError, psutil.Error):
        process = psutil.Process()
        soft, _ = process.rlimit(psutil.RLIMIT_NOFILE)
        yield HealthReading(Sign.DESCRIPTORS, "", process.num_fds() / soft)


class HealthLook:
    """Monitors the host, and reports every change and, repeatedly, lasting problems.

    Args:
        settings: the limits and the folders.
        report: called with all current problems, from one thread at a time.
        used: called in this object's thread with the worker's usage, if the world may change its size.
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
        """Start a daemon thread."""
        threading.Thread(target=self._run, name="samebits-health", daemon=True).start()

    def watch_device(self, device: WatchedDevice) -> None:
        """Monitor this device as well, in another thread, because a tool may be slow.

        Only the first call has an effect.
        """
        if self._device is None and device_look.limits_of(self._settings):
            self._device = DeviceLook(self._settings, device, self._take_of_device)
            self._device.start()

    def stop(self) -> None:
        """Stop monitoring."""
        self._over.set()
        if self._device is not None:
            self._device.stop()

    def _take_of_device(self, ailments: tuple[Ailment, ...], has_changed: bool) -> None:
        self._of_device = ailments
        if has_changed:
            self._tell()

    def _tell(self) -> None:
        with self._one_tells:  # the later report must be the newer one
            self._report(HealthReport((self._watch.ailments + self._of_device)[:MAX_AILMENTS]))

    def _run(self) -> None:
        places: list[Path] | None = None
        usage = Usage()
        while not self._over.wait(self._interval_s):
            if self._used is not None:
                self._used(usage.look())
            places = places_of(self._settings) if places is None else places
            has_changed = self._watch.look(readings(places, None, self._settings.log_dir))
            if has_changed or self._watch.ailments or self._of_device:
                self._tell()


class Usage:
    """This process's use of resources, from which the job's size can be chosen."""

    def __init__(self) -> None:
        self._before = (time.monotonic(), time.process_time())

    def look(self) -> tuple[Figure, ...]:
        """Return ``cpu``, the cores used since the last call, and ``memory``, the host's used share.

        With a control group, the share is that of its limit.
        """
        before, now = self._before, (time.monotonic(), time.process_time())
        self._before = now
        elapsed_s = now[0] - before[0]
        found = [Figure("cpu", (now[1] - before[1]) / elapsed_s)] if elapsed_s > 0 else []
        if (taken := taken_share()) is not None:
            found.append(Figure("memory", taken))
        return tuple(found)
