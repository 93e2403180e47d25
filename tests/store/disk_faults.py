"""Record the calls that change a disk, and make one of them fail: with an error, an interrupt or a kill.

Interposing on ``os`` suffices because everything durable goes through it. File descriptors are shown by their path.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CALLS = ("open", "write", "fsync", "ftruncate", "mkdir", "rename", "link", "unlink", "rmdir")


class InterruptedHere(BaseException):
    """An interrupt that ``except Exception`` does not catch."""


@dataclass(frozen=True)
class Call:
    name: str
    path: Path

    @property
    def target(self) -> str:
        """Return the last part of the path."""
        return self.path.name

    def __str__(self) -> str:
        return f"{self.name} {self.target}"


@dataclass
class Disk:
    """The calls made, and what happens at call number ``fail_at``: of all calls, or of those in ``only``."""

    fail_at: int = -1
    failure: Callable[[Call], None] | None = None
    only: tuple[str, ...] = CALLS
    half_writes: bool = False
    every_one_after: bool = False
    after_each: Callable[[Call], None] | None = None  # called after every successful call
    calls: list[Call] = field(default_factory=list)
    matching: int = 0

    def names(self) -> list[str]:
        return [str(call) for call in self.calls]

    def note(self, call: Call) -> bool:
        """Record a call; return whether it is the one that fails."""
        self.calls.append(call)
        if call.name not in self.only:
            return False
        self.matching += 1
        number = self.matching - 1
        return number == self.fail_at or (self.every_one_after and 0 <= self.fail_at <= number)


def error(number: int) -> Callable[[Call], None]:
    def fail(call: Call) -> None:
        raise OSError(number, os.strerror(number))

    return fail


NO_SPACE = error(errno.ENOSPC)


def interrupt(call: Call) -> None:
    raise InterruptedHere(str(call))


def kill_this_process(call: Call) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def interposed(disk: Disk, below: Path) -> Iterator[Disk]:
    """Route every disk call on paths below a folder through ``disk``."""
    originals = {name: getattr(os, name) for name in CALLS}
    opened: dict[int, Path] = {}

    def interpose(name: str) -> Callable[..., Any]:
        original = originals[name]

        def call(*args: Any, **kwargs: Any) -> Any:
            path = _path_of(args[0], kwargs.get("dir_fd", kwargs.get("src_dir_fd")), opened)
            if path is None or not path.is_relative_to(below) or (name == "open" and not _may_change(args)):
                result = original(*args, **kwargs)
                if name == "open" and path is not None:
                    opened[result] = path
                return result
            made = Call(name, path)
            if disk.note(made):
                if name == "write" and disk.half_writes:
                    original(args[0], memoryview(args[1])[: len(args[1]) // 2])
                assert disk.failure is not None
                disk.failure(made)
            result = original(*args, **kwargs)
            if name == "open":
                opened[result] = path
            elif name == "rename":  # an open file is known by its new name
                renamed = {descriptor: Path(args[1]) for descriptor, named in opened.items() if named == path}
                opened.update(renamed)
            if disk.after_each is not None:
                disk.after_each(made)
            return result

        return call

    try:
        for name in CALLS:
            setattr(os, name, interpose(name))
        yield disk
    finally:
        for name, original in originals.items():
            setattr(os, name, original)


@contextmanager
def closed(folder: Path) -> Iterator[None]:
    """Deny access to the folder (EACCES) for any user, root included."""
    originals = {name: getattr(os, name) for name in ("stat", "listdir", "scandir")}

    def refuse(name: str) -> Callable[..., Any]:
        def call(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            if not isinstance(path, int) and folder in (Path(path), *Path(path).parents)[name == "stat" :]:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return originals[name](path, *args, **kwargs)

        return call

    try:
        for name in originals:
            setattr(os, name, refuse(name))
        yield
    finally:
        for name, original in originals.items():
            setattr(os, name, original)


def names_in(folder: Path) -> list[str]:
    """Return the sorted names in a folder."""
    return sorted(entry.name for entry in folder.iterdir())


def _path_of(named: Any, folder: int | None, opened: dict[int, Path]) -> Path | None:
    """Return the path of a call's first argument; None for a descriptor opened elsewhere."""
    if isinstance(named, int):
        return opened.get(named)
    within = opened.get(folder, Path.cwd()) if folder is not None else Path.cwd()
    return Path(os.path.normpath(within / named))


def _may_change(open_arguments: tuple[Any, ...]) -> bool:
    return bool(open_arguments[1] & (os.O_CREAT | os.O_WRONLY | os.O_RDWR))
