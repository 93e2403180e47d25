"""How a worker is started on another host: the user's command, with the host and a line for the shell there put in.

Here live the template, its checks, the quoting, and which hosts are this machine. Never here: who is started where. The
one idea: no shell on this side ever reads the template. It is split into words once, a placeholder is filled in inside
its word, and what the other side's shell reads is quoted as one line, so that no host's name and no script's argument
can become a command.
"""

from __future__ import annotations

import functools
import ipaddress
import re
import shlex
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from samebits.config import OF_A_SHELL
from samebits.errors import UsageError
from samebits.net.address import is_local

EXAMPLE = "ssh -o BatchMode=yes {host} {command}"
_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")
_KNOWN = ("host", "node", "command")


@dataclass(frozen=True, slots=True)
class Template:
    """The words of the user's command, with their placeholders."""

    words: tuple[str, ...]

    def filled(self, host: str, node: str, command: str) -> list[str]:
        """The command that starts a worker: ``command`` is a line for the shell on ``host``."""
        values = {"host": host, "node": node, "command": command}
        return [_PLACEHOLDER.sub(lambda found: values[found[1]], word) for word in self.words]


def template_of(text: str) -> Template:
    """The template that a user wrote.

    Raises:
        UsageError: it names something unknown, lacks the command or the host, or is meant for a shell.
    """

    def wrong(why: str, fix: str) -> UsageError:
        return UsageError(f"HOST_LAUNCH={text[:120]}: {why}. Fix: {fix}")

    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise wrong(f"it cannot be split into words ({error})", "close its quotes") from None
    names = [name for word in words for name in _PLACEHOLDER.findall(word)]
    if unknown := [name for name in names if name not in _KNOWN]:
        raise wrong(f"{{{unknown[0]}}} is no placeholder", "use {host}, {node} and {command}")
    if "command" not in names or not {"host", "node"} & {*names}:
        raise wrong("it names no {command}, or neither {host} nor {node}", f"--launch '{EXAMPLE}'")
    if shell := next((word for word in words if word in OF_A_SHELL), None):
        raise wrong(f"no shell reads it, and {shell!r} is a shell's", "put that into a script, and name the script")
    if _PLACEHOLDER.search(words[0]):
        raise wrong("its first word is the program, and no placeholder", f"--launch '{EXAMPLE}'")
    return Template(words)


def shell_line(folder: Path, environment: Mapping[str, str], words: Sequence[str]) -> str:
    """A line for a POSIX shell that runs this command, in this folder and with these variables.

    The shell stays, so that a signal that ends the command becomes a status above 128: of a command that is itself
    ended by a signal ssh(1) says no more than 255, which is what it says where it could not get there.
    """
    told = [f"{name}={value}" for name, value in sorted(environment.items())]
    return f"cd {shlex.quote(str(folder))} && {shlex.join(['env', *told, *words])}; exit $?"


@functools.lru_cache(maxsize=4096)
def is_here(host: str) -> bool:
    """Whether a host is this machine, by its name or an address of its own; nothing is asked of a name service."""
    names = {"localhost", socket.gethostname(), socket.gethostname().partition(".")[0]}
    if host in names:
        return True
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return is_local(host)
