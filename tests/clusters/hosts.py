"""A job over hosts: where each process runs, what is lost with a host, and what replaces it.

Each process of a host works in that host's folder, which is its disk: checkpoints are stored there, and so is the
journal unless a folder is shared. Logs are outside, as if they were shipped.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from tests.clusters.namespaces import Family, Host, Switch
from tests.system.job import PROBE, Job
from tests.system.processes import Command, Running, WarmStarter

SECRET = "a secret of more than sixteen bytes"


class HostsJob(Job):
    """A job whose scheduler runs on the first host, and whose ranks are dealt to the hosts in turn.

    Args:
        hosts: where it runs, in order.
        network: which of the hosts' networks SCHED_HOST is in.
        shared: whether RECOVERY_PATH is visible to every host; otherwise it is on the scheduler's host's disk.
        standbys: how many hosts besides the first may have the scheduler: SCHED_HOST names them all.
    """

    def __init__(
        self,
        folder: Path,
        starter: WarmStarter,
        switch: Switch,
        *,
        args: tuple[str, ...] = (),
        workers: int = 3,
        family: Family = "IPv4",
        network: int = 0,
        shared: bool = False,
        standbys: int = 0,
        settings: Mapping[str, str] | None = None,
        script: Path = PROBE,
    ) -> None:
        self.switch = switch
        self.place: dict[str | int, Host] = {"scheduler": switch.hosts[0]}
        self.place |= {rank: switch.hosts[rank % len(switch.hosts)] for rank in range(workers)}
        addresses = [host.address(family, network) for host in switch.hosts[: 1 + standbys]]
        ours = {"SCHED_HOST": ",".join(addresses), "CLUSTER_SECRET": SECRET}
        if shared:
            ours["RECOVERY_PATH"] = str(folder / "shared" / "recovery")
        args = (*args, "--marks", str(folder))
        super().__init__(folder, starter, script=script, args=args, workers=workers, settings=ours | (settings or {}))

    def disk_of(self, host: Host) -> Path:
        """Return the host's own folder."""
        return self.folder / f"{host.number}-{host.name}"

    def ranks_on(self, host: Host) -> list[int]:
        return [name for name, place in self.place.items() if place is host and isinstance(name, int)]

    def _start(self, name: str | int, more: Mapping[str, str]) -> Running:
        host = self.place[name]
        self.disk_of(host).mkdir(exist_ok=True)
        command = Command(
            self._script, self._args, self.environment(**more), self.disk_of(host), self.log(name), inside=host.pid
        )
        return self._starter.start(command)

    def move_scheduler(self, host: Host) -> None:
        """Start a scheduler on this host, whatever happened to the last one."""
        self.place["scheduler"] = host
        self.start_scheduler()

    def lose(self, host: Host) -> None:
        """Lose the host with its processes, memory and disk; return when its ranks' processes are gone."""
        ranks = self.ranks_on(host)
        host.lose()
        self.switch.hosts.remove(host)
        for rank in ranks:
            self.wait_killed(rank)
        shutil.rmtree(self.disk_of(host))

    def replace(self, host: Host, name: str, number: int | None = None) -> Host:
        """Replace a lost host by a new one with an empty disk; ``number``: its address."""
        new = self.switch.host(name, number)
        self.place = {who: new if place is host else place for who, place in self.place.items()}
        return new
