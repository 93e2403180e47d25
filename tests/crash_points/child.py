"""The process whose forked children are failed and killed: ``python -m tests.crash_points.child``.

It reads one order per line (JSON), forks a child that runs the scenario on real files, and answers with one line: the
signal that ended it, what it promised, the calls it made, its error, and which content was durable. It imports
everything once, so that a child costs milliseconds. With ``--once`` it runs the scenario in its own process, for
strace.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from samebits.errors import StoreError
from tests.crash_points import mutants
from tests.crash_points.page_cache import PageCache
from tests.crash_points.scenarios import SCENARIOS
from tests.store.disk_faults import Call, Disk, error, interposed

_WRITE_LIMIT_BYTES = 7
_write = os.write  # the originals, before anything is interposed
_AUDITED = {
    "open": "open",
    "os.link": "link",
    "os.mkdir": "mkdir",
    "os.remove": "unlink",
    "os.rename": "rename",
    "os.rmdir": "rmdir",
    "os.symlink": "symlink",
    "os.truncate": "ftruncate",
}


class _Child:
    """One attempt at a scenario with the ordered fault; reports through a pipe that outlives it."""

    def __init__(self, order: dict[str, Any], report: int) -> None:
        self._order = order
        self._report = report
        self._folder = Path(order["folder"])
        holds, cache = self._folder.with_name("holds"), order.get("cache")
        self._cache = (
            PageCache.from_plain(self._folder, holds, cache) if cache else PageCache.all_durable(self._folder, holds)
        )
        self._disk = Disk(after_each=self._after_each)
        self._succeeded: list[int] = []
        self._audited: Counter[str] = Counter()
        self._is_over = False
        self._lift: Callable[[], None] = self._fail_no_more

    def tell(self, what: str, value: Any) -> None:
        _write(self._report, (json.dumps([what, value]) + "\n").encode())

    def run(self) -> None:
        order, disk = self._order, self._disk
        kind = order["fault"]
        if kind in _REFUSALS:  # the kernel refuses: nothing is interposed, and durability is unknown
            self._lift = _REFUSALS[kind](self._folder, order["at"])
            self._act()
            return
        if kind == "short writes":
            _shorten_writes()
        elif kind == "killed before":
            disk.fail_at, disk.failure = order["at"], self._die
        elif kind == "killed within":
            disk.fail_at, disk.failure, disk.half_writes = order["at"], self._die, True
        elif kind == "remounted":
            disk.fail_at, disk.failure, disk.every_one_after = order["at"], self._fail_then_refuse, True
        elif kind in errno.errorcode.values():
            disk.fail_at, disk.failure, disk.half_writes = order["at"], error(getattr(errno, kind)), True
        if kind == "no fault":
            sys.addaudithook(self._audit)
        with mutants.applied(order.get("mutant")), interposed(disk, self._folder):
            self._act()
        self._is_over = True
        if not order.get("bare"):
            self.tell("calls", disk.names())
            self.tell("succeeded", self._succeeded)
            seen = Counter(call.name for call in disk.calls)
            self.tell("unseen", sorted((self._audited - seen).elements()) if kind == "no fault" else [])
            self.tell("cache", self._cache.to_plain())

    def _act(self) -> None:
        attempt(self._order["scenario"], self._folder, self.tell, self._lift)

    def _audit(self, event: str, details: tuple[Any, ...]) -> None:
        """Count disk changes reported by Python itself (PEP 578): an excess bypassed our layer."""
        if event not in _AUDITED or self._is_over:
            return
        if event == "open" and not details[2] & (os.O_CREAT | os.O_WRONLY | os.O_RDWR):
            return
        if event == "os.link" and Path(details[1]).parent == self._cache.holds:
            return
        named = Path(os.fsdecode(details[0])) if isinstance(details[0], (str, bytes, Path)) else None
        if named is None or not named.is_absolute() or named.is_relative_to(self._folder):
            self._audited[_AUDITED[event]] += 1

    def _fail_no_more(self) -> None:
        self._disk.fail_at = -1

    def _die(self, call: Call) -> None:
        self.tell("cache", self._cache.to_plain())
        os.kill(os.getpid(), signal.SIGKILL)

    def _fail_then_refuse(self, call: Call) -> None:
        """Simulate a device that fails once and is remounted read-only (ext4, errors=remount-ro)."""
        first = self._disk.matching - 1 == self._order["at"]
        error(errno.EIO if first else errno.EROFS)(call)

    def _after_each(self, call: Call) -> None:
        if call.name == "fsync" and call.path.exists():
            (self._cache.sync_folder if call.path.is_dir() else self._cache.sync_file)(call.path)
        elif call.name in ("mkdir", "open"):
            self._cache.born(call.path)
        self._succeeded.append(len(self._disk.calls) - 1)
        if self._order["fault"] == "killed after" and self._succeeded[-1] == self._order["at"]:
            self._die(call)


def attempt(name: str, folder: Path, tell: Callable[[str, Any], None], lift: Callable[[], None]) -> None:
    """Run the scenario; after one of our errors keep its remains as ``failed``, ``lift`` the fault and retry."""
    scenario = SCENARIOS[name]
    try:
        scenario.act(folder, lambda number: tell("promised", number))
    except StoreError as failed:
        tell("error", str(failed))
    except Exception:
        tell("crash", traceback.format_exc())
    else:
        return
    lift()
    shutil.copytree(folder, folder.with_name("failed"))
    try:
        scenario.act(folder, lambda number: None)
    except Exception:
        tell("retry", traceback.format_exc())


def _limit_files(folder: Path, limit_bytes: int) -> Callable[[], None]:
    """Limit the size of files (setrlimit(2), RLIMIT_FSIZE; Python ignores SIGXFSZ)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _take_rights(folder: Path, _: int) -> Callable[[], None]:
    """Let root become the user nobody, without access to the folder; other users lose write access."""
    if os.geteuid() == 0:
        os.seteuid(65534)
        return lambda: os.seteuid(0)
    folders = [folder, *(path for path in folder.rglob("*") if path.is_dir())]
    modes = {path: path.stat().st_mode for path in folders}
    for path in folders:
        path.chmod(0o500)

    def give_back() -> None:
        for path, mode in modes.items():
            path.chmod(mode)

    return give_back


_REFUSALS: dict[str, Callable[[Path, int], Callable[[], None]]] = {"EFBIG": _limit_files, "EACCES": _take_rights}


def _shorten_writes() -> None:
    original = os.write

    def write(descriptor: int, data: Any) -> int:
        return original(descriptor, bytes(data)[:_WRITE_LIMIT_BYTES] if descriptor > 2 else data)

    os.write = write


def read_report(lines: Iterable[str]) -> dict[str, Any]:
    """Return a child's reports up to its end, the last one on each subject."""
    return {"promised": 0, "error": None, "crash": None, "retry": None, **dict(map(json.loads, lines))}


def obey(order: dict[str, Any]) -> dict[str, Any]:
    """Fork a child for one order and wait for its end."""
    incoming, outgoing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(incoming)
        status = 1
        try:
            _Child(order, outgoing).run()
            status = 0
        except BaseException:
            _write(2, traceback.format_exc().encode())
        finally:
            os._exit(status)
    os.close(outgoing)
    with os.fdopen(incoming) as lines:
        report = read_report(lines)
    return {"status": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), **report}


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--once"]:
        _, name, folder = arguments
        attempt(name, Path(folder), lambda what, value: print(json.dumps([what, value]), flush=True), lambda: None)
        return
    for line in sys.stdin:
        print(json.dumps(obey(json.loads(line))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
