"""A real Slurm of several hosts on this machine: munged, slurmctld and one slurmd per host, in a test's folder.

Each daemon runs in its host's namespaces (``namespaces``), as root, from files of the test. The machine's own
configuration is neither read nor changed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.clusters.namespaces import Host, Switch

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "sinfo", "scontrol", "squeue", "scancel")
SYSTEM_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
START_S = 60.0
CPUS = 8  # what Slurm assumes: steps of one job share them

CONFIGURATION = """\
ClusterName=test
SlurmctldHost=head({head})
SlurmctldPort=6817
SlurmdPort=6818
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=20
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=10
SlurmctldTimeout=10
KillWait=5
MessageTimeout=30
JobRequeue=1
SchedulerParameters=sched_interval=5,requeue_delay=1
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""


def missing() -> str:
    """Return briefly which programs this machine lacks, or an empty string."""
    lacking = [name for name in PROGRAMS if shutil.which(name, path=SYSTEM_PATH) is None]
    return f"no {', '.join(lacking)} (Debian's slurmctld, slurmd, slurm-client and munge)" if lacking else ""


class SlurmCluster:
    """Slurm on the hosts of a switch: the first, ``head``, controls, the others compute.

    Args:
        folder: for this cluster alone, visible to every host.
        switch: with its hosts.
    """

    def __init__(self, folder: Path, switch: Switch) -> None:
        self.folder = folder
        self.switch = switch
        self.head, *self.computing = switch.hosts
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._environment = {"PATH": SYSTEM_PATH, "SLURM_CONF": str(folder / "slurm.conf"), "HOME": str(folder)}
        (folder / "state").mkdir()
        names = "".join(f"{host.address()} {host.name}\n" for host in switch.hosts)
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        nodes = "\n".join(f"NodeName={one.name} NodeAddr={one.address()} CPUs={CPUS}" for one in self.computing)
        configuration = CONFIGURATION.format(folder=folder, head=self.head.address(), nodes=nodes)
        (folder / "slurm.conf").write_text(configuration)
        for host in switch.hosts:
            self._inside(host, "mount", "--bind", str(folder / "hosts"), "/etc/hosts")
        self._start_munge()
        self._daemon(self.head, "slurmctld", "-D")
        for host in self.computing:
            self.start_host(host)
        self._wait(lambda: self.states() == {host.name: "idle" for host in self.computing}, "idle hosts")

    def start_host(self, host: Host) -> None:
        """Start slurmd on a host that has none."""
        (self.folder / f"spool-{host.name}").mkdir(exist_ok=True)
        self._daemon(host, "slurmd", "-D", "-N", host.name)

    def _start_munge(self) -> None:
        munge = self.folder / "munge"
        munge.mkdir(mode=0o711)
        key = munge / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        words = [f"--{option}={munge / name}" for option, name in files.items()]
        self._daemon(self.head, "munged", "--foreground", "--force", *words)
        self._wait(lambda: (munge / "socket").exists(), "munge's socket")

    def _daemon(self, host: Host, *words: str) -> None:
        with (self.folder / f"{words[0]}-{host.name}.out").open("ab") as out:
            self._daemons.append(
                subprocess.Popen(
                    [*_entering(host), *words],
                    env=self._environment,
                    cwd=self.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    start_new_session=True,
                )
            )

    def _inside(
        self, host: Host, *words: str, more: Mapping[str, str] | None = None, folder: Path | None = None
    ) -> str:
        done = subprocess.run(
            [*_entering(host, folder), *words],
            env={**self._environment, **(more or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=START_S,
            check=False,
        )
        assert done.returncode == 0, f"{' '.join(words)}: {done.stdout}{done.stderr}\n{self.tails()}"
        return done.stdout

    def command(self, *words: str) -> str:
        """Run a Slurm command on the head; return its output."""
        return self._inside(self.head, *words)

    def submit(self, folder: Path, environment: Mapping[str, str], *words: str) -> int:
        """Run ``sbatch`` from that folder; return the job's number."""
        return int(self._inside(self.head, "sbatch", "--parsable", *words, more=environment, folder=folder))

    def states(self) -> dict[str, str]:
        """Return the states of the compute hosts according to Slurm."""
        rows = self.command("sinfo", "--noheader", "--Node", "--format=%n %t").split("\n")
        return dict(row.split() for row in rows if row)

    def state_of(self, job: int) -> str:
        """Return the job's state, such as RUNNING, COMPLETED, FAILED."""
        text = self.command("scontrol", "--oneliner", "show", "job", str(job))
        return next(word.partition("=")[2] for word in text.split() if word.startswith("JobState="))

    def steps_of(self, job: int) -> dict[str, str]:
        """Return the numbers of the job's running steps by name."""
        rows = self.command("squeue", "--noheader", "--steps", "--jobs", str(job), "--format=%j %i").split("\n")
        return dict(row.split() for row in rows if row)

    def _wait(self, holds: object, what: str, timeout_s: float = START_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not holds():  # type: ignore[operator]
            assert time.monotonic() < deadline, f"no {what} within {timeout_s:g} s\n{self.tails()}"
            time.sleep(0.1)

    def wait_for_state(self, job: int, *states: str, timeout_s: float) -> str:
        """Wait until the job is in one of these states; return it."""
        self._wait(lambda: self.state_of(job) in states, f"state {states} of job {job}", timeout_s)
        return self.state_of(job)

    def lose(self, name: str) -> None:
        """Lose the host of that name, as in a power cut."""
        host = next(one for one in self.computing if one.name == name)
        host.lose()
        self.computing.remove(host)
        self.switch.hosts.remove(host)

    def tails(self) -> str:
        """Return the ends of the daemons' logs."""
        logs: Sequence[Path] = sorted([*self.folder.glob("*.log"), *self.folder.glob("*.out")])
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-1500:]}" for log in logs)

    def close(self) -> None:
        """End the daemons this object started, and all hosts."""
        for daemon in self._daemons:
            daemon.terminate()
        self.switch.close()
        for daemon in self._daemons:
            daemon.wait(START_S)


def _entering(host: Host, folder: Path | None = None) -> list[str]:
    words = ["nsenter", "--target", str(host.pid), "--net", "--uts", "--mount", "--pid"]
    return [*words, "env", "--chdir", str(folder or "/")]
