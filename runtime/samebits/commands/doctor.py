"""``samebits doctor``: check what a job needs on this machine.

Each check is a function that returns findings. Nothing is changed and torch is not imported. A finding about a problem
ends with the command that fixes it. If the machine has several network interfaces, a check reports a faster one that is
not used.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import shutil
import socket
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from samebits.config import Settings, is_loopback
from samebits.errors import ListenError, SecretError, SettingsError, StoreError
from samebits.launcher import job_spec
from samebits.launcher.scheduler_link import ask_once, at_address, known_addresses
from samebits.net.address import check_free, is_local, listening
from samebits.net.address_book import addresses_now
from samebits.net.descriptors import hard_limit, needed_descriptors
from samebits.scheduler_hosts import NotHostsError, SchedulerAddress, names_one
from samebits.service.scheduler_address import address_towards
from samebits.store.checkpoint.remote_points import slots_at

ENOUGH = 2.0  # a speed ratio that is worth reporting


@dataclass(frozen=True, slots=True)
class Interface:
    """One interface that is up and has an address.

    Attributes:
        addresses: its IP addresses, of both families.
        mbit: its speed in Mbit/s; None if the kernel does not know the speed, as for virtual or wireless interfaces.
    """

    name: str
    addresses: frozenset[str]
    mbit: int | None


def interfaces() -> list[Interface]:
    """Return this host's interfaces, except loopback."""
    import psutil  # type: ignore[import-untyped]  # slow to import

    states, found = psutil.net_if_stats(), []
    for name, entries in psutil.net_if_addrs().items():
        ours = [one.address for one in entries if one.family in (socket.AF_INET, socket.AF_INET6)]
        addresses = frozenset(address.partition("%")[0] for address in ours)
        if addresses and not addresses & {"127.0.0.1", "::1"}:
            found.append(Interface(name, addresses, (states[name].speed or None) if name in states else None))
    return found


def slower(used: str, known: list[Interface]) -> tuple[Interface, Interface] | None:
    """Return the interface with this address and a faster one.

    Return None if there is no faster one, or if speeds are unknown.
    """
    ours = next((one for one in known if used in one.addresses), None)
    if ours is None or ours.mbit is None:
        return None
    faster = [one for one in known if one.mbit is not None and one.mbit >= ENOUGH * ours.mbit]
    return (ours, max(faster, key=lambda one: one.mbit or 0)) if faster else None


OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 13)
ANSWER_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class DoctorFinding:
    """The result of one check; ``fix`` is empty if nothing is wrong."""

    what: str
    found: str
    fix: str = ""


def main(arguments: Sequence[str]) -> int:
    """Run the subcommand; return 1 if anything is wrong."""
    parser = argparse.ArgumentParser(
        prog="samebits doctor", description="Check this machine for what a job needs. Changes nothing."
    )
    parser.add_argument(
        "--preflight",
        action="store_true",
        help="also compute, fill memory and write to the checkpoints' disk, as a worker does with HEALTH=preflight",
    )
    options = parser.parse_args(arguments)
    findings = [python(), torch(), *import_name(sys.path), *commands()]
    try:
        settings = job_spec.settings_here(only_looks=True)
    except SettingsError as error:
        findings += [DoctorFinding("environment", problem, "as it says") for problem in error.problems]
    else:
        findings += [
            *(folder(name, path) for name, path in folders(settings)),
            *scheduler(settings),
            reach(settings),
            *network(settings),
        ]
        findings.append(descriptors(settings))
        if options.preflight:
            findings += preflight(settings)
    for finding in findings:
        print(f"{'ok   ' if not finding.fix else 'wrong'}  {finding.what}: {finding.found}")
        if finding.fix and "Fix: " not in finding.found:
            print(f"       Fix: {finding.fix}")
    return 1 if any(finding.fix for finding in findings) else 0


def preflight(settings: Settings) -> list[DoctorFinding]:
    """Run a worker's checks before registration on each of this machine's devices."""
    from samebits.training.process import preflight as looked

    return [
        DoctorFinding(
            one.what, f"{one.found}{f': {one.problem}' if one.problem else ''}", one.problem and _PREFLIGHT_FIX
        )
        for one in looked.of_host(settings)
    ]


_PREFLIGHT_FIX = "leave this host out of the job, or have it looked at"


def python() -> DoctorFinding:
    """Check the interpreter's version."""
    found = f"{sys.version.split()[0]} ({sys.executable})"
    return DoctorFinding("python", found, "" if sys.version_info >= OLDEST_PYTHON else "install Python 3.11 or newer")


def torch() -> DoctorFinding:
    """Check the installed version of torch from its metadata, because importing torch takes seconds."""
    fix = "bash scripts/setup.sh"
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return DoctorFinding("torch", "not installed for this Python", fix)
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    return DoctorFinding("torch", version, "" if numbers >= OLDEST_TORCH else fix)


def import_name(path: Sequence[str]) -> list[DoctorFinding]:
    """Check that ``import samebits`` finds this package, and that no other file of that name is on ``path``."""
    ours = Path(__file__).resolve().parents[1]
    names = ("samebits.py", "samebits/__init__.py")
    found = [file for entry in path if entry for name in names if (file := Path(entry, name).resolve()).is_file()]
    rival = next((file for file in found if not file.is_relative_to(ours)), None)
    if rival is None:
        return [DoctorFinding("import samebits", str(ours))]
    return [DoctorFinding("import samebits", f"{ours}, but {rival} has the same name", f"move {rival} away")]


def commands() -> list[DoctorFinding]:
    """Check for the programs that the scripts call."""
    names = ("bash", "setsid", "flock")
    return [
        DoctorFinding(name, found)
        if (found := shutil.which(name))
        else DoctorFinding(name, "not found", "install util-linux and bash")
        for name in names
    ]


def folder(name: str, path: Path | str) -> DoctorFinding:
    """Check that this user can write to the folder or create it or, if it is remote, list it."""
    if isinstance(path, str):
        try:
            slots = slots_at(path, patience_s=ANSWER_TIMEOUT_S)
        except StoreError as error:
            return DoctorFinding(name, str(error), "as it says")
        return DoctorFinding(name, f"{path} can be listed, {len(slots)} ranks have saved there")
    try:
        existing = next(parent for parent in (path, *path.parents) if parent.exists())
        is_folder = existing.is_dir()
    except OSError as error:
        return DoctorFinding(
            name, f"{path} cannot be looked at ({error.strerror})", f"export {name}=<a folder of yours>"
        )
    if not is_folder:
        return DoctorFinding(name, f"{existing} is not a folder", f"export {name}=<a folder>")
    try:
        Path(
            tempfile.mkdtemp(prefix=".samebits-", dir=existing)
        ).rmdir()  # access(2) does not detect /proc or a full disk
    except OSError as error:
        return DoctorFinding(
            name, f"{existing} cannot be written ({error.strerror})", f"export {name}=<a folder of yours>"
        )
    return DoctorFinding(name, f"{path} can be {'written' if existing == path else 'made'}")


def scheduler(settings: Settings) -> list[DoctorFinding]:
    """Check the possible addresses of the scheduler: one address, or each host in SCHED_HOST."""
    if names_one(settings.sched_host):
        return [port(settings)]
    name = f"SCHED_HOST={settings.sched_host}"
    try:
        named = addresses_now(settings.sched_host, settings.sched_port)
    except NotHostsError as error:
        return [DoctorFinding(name, str(error), "as it says")]
    found = [_at(settings, one) for one in named]
    try:
        addresses, own = listening(settings.sched_host, settings.sched_port, settings.sched_bind)
    except ListenError:
        return [*found, DoctorFinding(name, "none of these hosts is this one: its scheduler runs elsewhere")]
    return [*found, DoctorFinding(name, f"a scheduler of this host listens on {', '.join(addresses)}, port {own}")]


def _at(settings: Settings, address: SchedulerAddress) -> DoctorFinding:
    name = f"SCHED_HOST {address}"
    try:
        resolved = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(address.host, address.port)})
    except socket.gaierror as error:
        return DoctorFinding(name, f"it has no address ({error.strerror})", "write a name that this host can look up")
    try:
        told = ask_once(at_address(settings, address), ANSWER_TIMEOUT_S)
    except SecretError as error:
        return DoctorFinding(name, str(error), "as it says")
    if told is not None:
        return DoctorFinding(name, f"the scheduler of job {told.job} answers there, term {told.term}")
    whose = "this host" if any(is_local(one) for one in resolved) else "another host"
    return DoctorFinding(name, f"{whose} ({', '.join(resolved)}); no scheduler answers there now")


def network(settings: Settings) -> list[DoctorFinding]:
    """Check which network interface a job on several hosts uses, and report a much faster unused one."""
    try:
        used = address_towards(settings.sched_host, settings.sched_port)
    except OSError:
        return []  # the scheduler's check reports it
    if is_loopback(used):
        return []
    known = interfaces()
    found = next((f"{one.name} ({used})" for one in known if used in one.addresses), used)
    speeds = slower(used, known)
    if speeds is None:
        return [DoctorFinding("network", f"gradients go over {found}, which leads to SCHED_HOST")]
    ours, faster = speeds
    better = min(faster.addresses, key=lambda one: (":" in one, one))
    return [
        DoctorFinding(
            "network",
            f"gradients go over {found} at {ours.mbit} Mbit/s, but {faster.name} ({better}) offers {faster.mbit}",
            f"export SCHED_HOST=<the scheduler's address in the network of {faster.name}>, in every process",
        )
    ]


def port(settings: Settings) -> DoctorFinding:
    """Check that a scheduler could listen on the port, or that a job's scheduler is listening there."""
    name = f"SCHED_PORT={settings.sched_port}"
    try:
        if ask_once(settings, ANSWER_TIMEOUT_S) is not None:
            return DoctorFinding(name, "a job's scheduler answers there")
    except SecretError as error:
        return DoctorFinding(name, str(error), "as it says")
    try:
        check_free(*listening(settings.sched_host, settings.sched_port, settings.sched_bind))
    except ListenError as error:
        return DoctorFinding(name, str(error), "as it says")
    return DoctorFinding(name, "free")


def reach(settings: Settings) -> DoctorFinding:
    """Describe which hosts reach the job's ports, and which ports the secret protects."""
    name = "open to"
    try:
        addresses = listening(settings.sched_host, settings.sched_port, settings.sched_bind).addresses
    except ListenError:
        # Another host has the scheduler: this host's workers listen on the interface that leads to it, unless it is
        # loopback.
        addresses = [settings.sched_bind] if settings.sched_bind else [one.host for one in known_addresses(settings)]
    everybody = not all(is_loopback(address) for address in addresses)
    who = "anyone who reaches this host's network" if everybody else "this host's users"
    has_secret = settings.cluster_secret is not None or settings.cluster_secret_file is not None
    scheduler = (
        "the scheduler accepts every process with the secret"
        if has_secret
        else "the scheduler accepts every process (no CLUSTER_SECRET)"
    )
    return DoctorFinding(
        name,
        f"{who}, at {', '.join(addresses)}: {scheduler}; gloo's ports are open (docs/how-to/secure-a-job.md)",
    )


def descriptors(settings: Settings) -> DoctorFinding:
    """Check that the scheduler can open a connection for every worker. It raises its soft limit by itself."""
    needed = needed_descriptors(settings.max_worker_num + settings.spare_num)
    found = f"{hard_limit()}, {needed} needed"
    fix = "" if hard_limit() >= needed else f"raise the hard limit: ulimit -Hn {needed} (as root)"
    return DoctorFinding("open files", found, fix)


def folders(settings: Settings) -> list[tuple[str, Path | str]]:
    """Return the names of the variables for the job's folders, with the folders."""
    return [
        ("RECOVERY_PATH", settings.recovery_path),
        ("CHECKPOINT_PATH", settings.checkpoint_path),
        ("LOG_DIR", settings.log_dir),
    ]
