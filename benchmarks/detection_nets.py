"""Two networks joined by one cable, to cut off one worker of a job; the machine's own network is untouched.

Needs root, unshare(1), nsenter(1) and iproute2. A neighbour entry with an unused address loses every packet without
telling the sender (ip-neighbour(8)), as a failing switch does.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Sequence

from benchmarks.processes import start

HERE, THERE = "10.98.0.1", "10.98.0.2"
_MACS = {HERE: "02:00:00:00:98:01", THERE: "02:00:00:00:98:02"}
_NOBODY = "02:00:00:00:98:fe"
_DEVICES = {HERE: "here0", THERE: "there0"}
_WITHIN_S = 30.0


class Nets:
    """Both networks; ``inside`` runs a command in the network with this address.

    Raises:
        OSError: this machine or this user cannot create them.
    """

    def __init__(self) -> None:
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        try:
            for address in (HERE, THERE):
                self._holders[address] = self._hold()
            there = self._holders[THERE].pid
            names = ["name", _DEVICES[HERE], "type", "veth", "peer", "name", _DEVICES[THERE], "netns", str(there)]
            self._ip(HERE, "link", "add", *names)
            for address in (HERE, THERE):
                self._ip(address, "link", "set", "lo", "up")
                self._ip(address, "link", "set", _DEVICES[address], "address", _MACS[address])
                self._ip(address, "addr", "add", f"{address}/24", "dev", _DEVICES[address])
                self._ip(address, "link", "set", _DEVICES[address], "up")
        except (OSError, subprocess.SubprocessError) as error:
            self.close()
            raise OSError(f"network namespaces and iproute2 are needed, as root: {error}") from None

    def __enter__(self) -> Nets:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def inside(self, address: str, command: Sequence[str]) -> list[str]:
        return ["nsenter", "--target", str(self._holders[address].pid), "--net", *command]

    def cut(self) -> None:
        """Block all traffic in both directions from now on."""
        for address, other in ((HERE, THERE), (THERE, HERE)):
            self._neighbour(address, other, _NOBODY)

    def mend(self) -> None:
        for address, other in ((HERE, THERE), (THERE, HERE)):
            self._neighbour(address, other, _MACS[other])

    def close(self) -> None:
        for holder in self._holders.values():
            holder.kill()
            holder.wait()
            assert holder.stdout is not None
            holder.stdout.close()
        self._holders.clear()

    def _hold(self) -> subprocess.Popen[bytes]:
        holder = start(
            ["unshare", "--net", "sh", "-c", "echo ready; exec sleep 86400"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert holder.stdout is not None
        if holder.stdout.readline() != b"ready\n":
            holder.wait()
            holder.stdout.close()
            raise OSError("unshare --net is not allowed here")
        return holder

    def _neighbour(self, address: str, other: str, mac: str) -> None:
        words = ["neigh", "replace", other, "lladdr", mac, "dev", _DEVICES[address], "nud", "permanent"]
        self._ip(address, *words)

    def _ip(self, address: str, *words: str) -> None:
        command = self.inside(address, ["ip", *words])
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_WITHIN_S)
        if done.returncode != 0:
            raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


def nets_need() -> str:
    """Return why the networks cannot be created here, or an empty string."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(Nets())
        except OSError as error:
            return str(error)
    return ""
