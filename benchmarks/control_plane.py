"""One scheduler and ten thousand workers: forming, heartbeats, losses and returns, beside bare sockets and peers.

``python -m benchmarks.control_plane [--quick] [--workers N …]``; ``--etcd`` only compares a journal in etcd with one in
a file, ``--standby`` only measures a standby scheduler's takeover, ``--relays N`` only a formation behind N relays,
also in a tree, with one without relays, and ``--tree N`` only a job behind N inner relays (``control_plane_tree``). The
workers are simulated (``workers.control_plane``: a DEALER each, many per process, with the product's messages). The
scheduler is the real process with its journal on disk. *Formed* runs from the first connect until the last worker has
received its durable place: connect, Register → Admitted, all in → RoundOpened, Join → GenerationStarted, and the
heartbeats in between. The bare ROUTER has the same conversation with the same clients; the echo is one message and its
answer. All clients run on the measured machine, so wall times include them; the server's own CPU time is more reliable,
until the last worker is admitted and until all are formed. NODE_TIMEOUT is 30 s here, because a machine that simulates
all workers may keep them silent for longer than 5. A loss that needs GRACE's reconnect (the process is not on the
scheduler's host) is timed after that grace period. The floor of a decision is the death itself, since killed processes
take time to end.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks import control_plane_trials as trials
from benchmarks.control_plane_stage import descriptor_problem
from benchmarks.control_plane_tree import RANKS_A_HOST
from benchmarks.control_plane_tree import measure as measure_tree
from benchmarks.control_plane_trials import Formed, Kept, Losses, MassLoss, Registered, Served
from benchmarks.formation import fsync_ms
from benchmarks.report import MISSING, Progress, Report, median, rounded, spread, table

LEASE_S = 2
LOST_BY = {"killed": signal.SIGKILL, "suspended": signal.SIGSTOP}
WORKERS = (100, 1000, 10_000)
WORKERS_QUICK = (100, 1000)
TRIALS, TRIALS_QUICK = 5, 3
BEATS_S, BEATS_QUICK_S = 5.0, 3.0
VICTIMS, VICTIMS_QUICK = 40, 20
CLIENTS = 2
INNER = 4
"""So few that two dozen relays form a tree of three levels."""
MOST_GRPC = 1000  # a channel of gRPC's Python takes about 0.3 MB and a millisecond
TCPSTORE, GRPC = "TCPStore", "gRPC"
PEER_MODULES = {TCPSTORE: "torch", GRPC: "grpc"}


@dataclass(slots=True)
class Found:
    """All measurements for one number of workers."""

    ours: list[Served] = field(default_factory=list)
    curve: list[Served] = field(default_factory=list)
    bare: list[Served] = field(default_factory=list)
    bare_curve: list[Served] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)
    mass: list[MassLoss] = field(default_factory=list)
    losses: list[Losses] = field(default_factory=list)
    echo_s: list[float] = field(default_factory=list)
    publish_s: list[float] = field(default_factory=list)
    peers_s: dict[str, list[float]] = field(default_factory=dict)


@dataclass(slots=True)
class OnEtcd:
    """Formations with a journal in a file, and with one in etcd, whose leaders are killed and suspended meanwhile."""

    file: list[Registered] = field(default_factory=list)
    etcd: list[Registered] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is measured."""

    workers: Sequence[int]
    trials: int
    beats_s: float
    victims: int
    clients: int
    curve: bool


def measure(extent: Extent) -> dict[int, Found]:
    """Measure all contestants in turn, at each number of workers."""
    lacking = {peer: f"the module {name}" for peer, name in PEER_MODULES.items() if not importlib.util.find_spec(name)}
    progress, found = Progress(f"{', '.join(map(str, extent.workers))} workers, {extent.trials} trials", lacking), {}
    for workers in extent.workers:
        here = found[workers] = Found()
        for trial in range(extent.trials):
            for contest in _contests(here, workers, extent)[:: -1 if trial % 2 else 1]:
                contest()
        progress.say(
            f"{workers} workers: formed in {spread([one.form_s for one in here.ours])} s, "
            f"by a bare ROUTER in {spread([one.form_s for one in here.bare])} s"
        )
    return found


def measure_etcd(extent: Extent) -> dict[int, OnEtcd]:
    """Form each number of workers on both kinds of journal, in turn."""
    progress, found = Progress(f"{', '.join(map(str, extent.workers))} workers on a file and on three etcd servers"), {}
    for workers in extent.workers:
        here = found[workers] = OnEtcd()
        for _ in range(extent.trials):
            here.file.append(trials.registered(workers, extent.clients))
            fourth = here.file[-1].journal_bytes // 4
            here.etcd.append(trials.registered(workers, extent.clients, etcd_kill_at=fourth))
        progress.say(
            f"{workers} workers: formed in {spread([one.form_s for one in here.file])} s on a file, in "
            f"{spread([one.form_s for one in here.etcd])} s on an etcd whose leaders were killed and suspended"
        )
    return found


def report_etcd(found: dict[int, OnEtcd]) -> Report:
    """Report the comparison of both kinds of journal."""
    ours, ratios = {}, {}
    for workers, here in found.items():
        form_s = {
            name: median([one.form_s for one in some]) for name, some in (("file", here.file), ("etcd", here.etcd))
        }
        ours[str(workers)] = {
            "file_form_s": form_s["file"],
            "etcd_form_s": form_s["etcd"],
            "journal_bytes": here.file[-1].journal_bytes,
            "journal_at_kill_bytes": here.etcd[-1].at_kill,
            "journal_at_stop_bytes": here.etcd[-1].at_stop,
            "registrations_lost_count": max(one.lost for one in (*here.file, *here.etcd)),
            "registrations_doubled_count": max(one.doubled for one in (*here.file, *here.etcd)),
        }
        ratios[str(workers)] = {"etcd_form_vs_file": rounded(form_s["etcd"] / form_s["file"])}
    return Report("control_plane", {"fsync_ms": median(fsync_ms())}, {}, {"by_workers": ours}, {"by_workers": ratios})


def measure_takeovers(extent: Extent) -> dict[int, dict[str, list[float]]]:
    """Lose the scheduler in turn by a kill and by a suspension, with a standby on the same etcd."""
    progress = Progress(f"{', '.join(map(str, extent.workers))} workers, a standby scheduler, {extent.trials} trials")
    found: dict[int, dict[str, list[float]]] = {}
    for workers in extent.workers:
        here = found[workers] = {name: [] for name in LOST_BY}
        for _ in range(extent.trials):
            for name, lost_by in LOST_BY.items():
                here[name].append(trials.takeover(workers, extent.clients, lost_by, LEASE_S))
        shown = ", ".join(f"{name} {spread(some)} s" for name, some in here.items())
        progress.say(f"{workers} workers: the standby served after {shown}")
    return found


def report_takeovers(found: dict[int, dict[str, list[float]]]) -> Report:
    """Report the seconds until the standby served; the lease is the floor if the scheduler is suspended."""
    ours = {str(n): {f"{name}_takeover_s": median(some) for name, some in here.items()} for n, here in found.items()}
    beyond = {
        size: {"suspended_beyond_lease_s": rounded(one["suspended_takeover_s"] - LEASE_S)} for size, one in ours.items()
    }
    return Report(
        "control_plane",
        {"lease_s": LEASE_S, "fsync_ms": median(fsync_ms())},
        {},
        {"by_workers": {size: {**one, **beyond[size]} for size, one in ours.items()}},
        {
            "by_workers": {
                size: {"suspended_vs_lease": rounded(one["suspended_takeover_s"] / LEASE_S)}
                for size, one in ours.items()
            }
        },
    )


def measure_relays(extent: Extent, relays: int, **variables: str) -> dict[int, dict[str, list[Formed]]]:
    """Form each number of workers with a bare ROUTER, and with our scheduler, without and behind relays.

    With enough relays, they are at the scheduler (``relayed``), below INNER of them by hand (``placed``), or in the
    tree that they choose if no relay, and not the scheduler, may have more than INNER relays (``chosen``).
    """
    progress = Progress(f"{', '.join(map(str, extent.workers))} workers, without and with {relays} relays")
    contestants: dict[str, dict[str, Any]] = {"router": {"is_bare": True}, "direct": {}, "relayed": {"relays": relays}}
    if relays > INNER:
        contestants["placed"] = {"relays": relays, "inner": INNER}
        contestants["chosen"] = {"relays": relays, "fan_out": INNER}
    found: dict[int, dict[str, list[Formed]]] = {}
    for workers in extent.workers:
        here: dict[str, list[Formed]] = {name: [] for name in contestants}
        found[workers] = here
        for trial in range(extent.trials):
            for name in list(here)[:: -1 if trial % 2 else 1]:
                here[name].append(trials.formed(workers, extent.clients, **contestants[name], **variables))
        shown = ", ".join(f"{name} {spread([_cpu_us(one, workers) for one in some])}" for name, some in here.items())
        progress.say(f"{workers} workers: the server's CPU time for each, in µs: {shown}")
    return found


def _cpu_us(formed: Formed, workers: int) -> float:
    return formed.form_cpu_s / workers * 1e6


def report_relays(found: dict[int, dict[str, list[Formed]]], relays: int) -> Report:
    """Report the formations with and without relays, and the bare ROUTER's as the floor of those without."""
    figures: dict[int, dict[str, dict[str, float]]] = {}
    for workers, here in found.items():
        figures[workers] = {
            name: {
                "form_s": median([one.form_s for one in some]),
                "admitted_cpu_us": median([one.admit_cpu_s / workers * 1e6 for one in some]),
                "cpu_us_per_registration": median([_cpu_us(one, workers) for one in some]),
                "relays_cpu_us": median([one.relays_cpu_s / workers * 1e6 for one in some]),
                "connections_count": max(one.connections for one in some),
            }
            for name, some in here.items()
        }
    floor: dict[str, dict[str, float]] = {}
    ours: dict[str, dict[str, float]] = {}
    ratios: dict[str, dict[str, float]] = {}
    for workers, by_name in figures.items():
        size, direct = str(workers), by_name["direct"]
        floor[size] = {f"router_{name}": value for name, value in by_name["router"].items() if "relays" not in name}
        ours[size] = {f"direct_{name}": value for name, value in direct.items() if "relays" not in name}
        behind = {way: each for way, each in by_name.items() if way not in ("router", "direct")}
        ours[size] |= {"relays_count": relays}
        ours[size] |= {f"{way}_{name}": value for way, each in behind.items() for name, value in each.items()}
        ratios[size] = {
            f"{way}_{name}_vs_{other}": rounded(each[name] / by_name[other][name])
            for way, each in behind.items()
            for other in (("direct",) if way == "relayed" else ("direct", "relayed"))
            for name in ("form_s", "admitted_cpu_us", "cpu_us_per_registration")
        }
    return Report("control_plane", {"by_workers": floor}, {}, {"by_workers": ours}, {"by_workers": ratios})


def _contests(found: Found, workers: int, extent: Extent) -> list[Callable[[], None]]:
    clients, victims = extent.clients, min(extent.victims, workers // 5)

    def ours() -> None:
        served, kept, mass = trials.ours(workers, clients, extent.beats_s)
        found.ours.append(served)
        found.kept.append(kept)
        found.mass.append(mass)

    def curve() -> None:
        found.curve.append(trials.encrypted(workers, clients, extent.beats_s))

    def bare_curve() -> None:
        found.bare_curve.append(trials.bare_encrypted(workers, clients, extent.beats_s))

    def peer(name: str) -> None:
        found.peers_s.setdefault(name, []).append(trials.peer(name.lower(), workers, clients))

    contests = [
        lambda: found.bare.append(trials.bare(workers, clients, extent.beats_s)),
        ours,
        lambda: found.echo_s.append(trials.echo(workers, clients)),
        lambda: found.losses.append(trials.losses(workers, clients, victims)),
        lambda: found.publish_s.append(trials.publish(workers, clients)),
    ]
    contests += [functools.partial(peer, name) for name in (TCPSTORE, GRPC) if _takes_part(name, workers)]
    return [*contests, curve, bare_curve] if extent.curve else contests


def _takes_part(peer: str, workers: int) -> bool:
    return importlib.util.find_spec(PEER_MODULES[peer]) is not None and (peer == TCPSTORE or workers <= MOST_GRPC)


# ---- figures


def figures(found: Found, workers: int) -> dict[str, float]:
    """Return our figures for one number of workers."""
    decisions_ms = [one * 1e3 for each in found.losses for one in each.decision_s]
    return {
        "form_s": median([one.form_s for one in found.ours]),
        "cpu_us_per_registration": median([one.form_cpu_s / workers * 1e6 for one in found.ours]),
        "admitted_cpu_us": median([one.admit_cpu_s / workers * 1e6 for one in found.ours]),
        "kib_per_worker": median([one.resident_kib / workers for one in found.ours]),
        "heartbeat_cpu_us": median([_beat_us(one) for one in found.ours]),
        "heartbeats_per_s": median([one.beats / one.beats_s for one in found.ours]),
        "heartbeat_cpu_s_per_s": median([one.beats_cpu_s / one.beats_s for one in found.ours]),
        "heartbeat_vs_bare": _ratio(found.ours, found.bare, _beat_us),
        "decision_ms": median(decisions_ms),
        "decision_p99_ms": _p99(decisions_ms),
        "decisions_count": len(decisions_ms),
        "told_all_ms": median([one.told_s * 1e3 for one in found.losses]),
        "mass_loss_seen_s": median([one.all_seen_s for one in found.mass]),
        "mass_loss_rounds_count": max(one.rounds for one in found.mass),
        "back_s": median([one.back_s for one in found.ours]),
        "journal_load_ms": median([one.load_s * 1e3 for one in found.kept]),
        "registrations_lost_count": max(workers - min(one.seats, one.resumed) for one in found.kept),
    }


def ratios(found: Found) -> dict[str, float]:
    """Return ours ÷ the floor's or a peer's for one number of workers; medians of each."""
    ours_s = median([one.form_s for one in found.ours])
    told_s = median([one.told_s for one in found.losses])
    result = {
        "form_vs_router": _ratio(found.ours, found.bare, lambda one: one.form_s),
        "form_vs_router_echo": rounded(ours_s / median(found.echo_s)),
        "form_cpu_vs_router": _ratio(found.ours, found.bare, lambda one: one.form_cpu_s),
        "heartbeat_vs_bare": _ratio(found.ours, found.bare, _beat_us),
        "fanout_vs_pub": rounded(told_s / median(found.publish_s)),
        "fanout_vs_router": rounded(told_s / median([one.told_s for one in found.bare])),
        "reconnect_vs_storm": _ratio(found.ours, found.bare, lambda one: one.back_s),
    }
    for peer, times_s in found.peers_s.items():
        result[f"form_vs_{peer.lower()}"] = rounded(ours_s / median(times_s))
    if found.curve:
        result["curve_form_vs_plain"] = _ratio(found.curve, found.ours, lambda one: one.form_s)
        result["curve_form_cpu_vs_plain"] = _ratio(found.curve, found.ours, lambda one: one.form_cpu_s)
        result["curve_heartbeat_vs_plain"] = _ratio(found.curve, found.ours, _beat_us)
        result["router_curve_form_vs_plain"] = _ratio(found.bare_curve, found.bare, lambda one: one.form_s)
        result["router_curve_heartbeat_vs_plain"] = _ratio(found.bare_curve, found.bare, _beat_us)
    return result


def _beat_us(served: Served) -> float:
    return served.beats_cpu_s / max(1, served.beats) * 1e6


def _ratio(ours: Sequence[Served], others: Sequence[Served], figure: Callable[[Served], float]) -> float:
    return rounded(median([figure(one) for one in ours]) / median([figure(one) for one in others]))


def report(found: dict[int, Found]) -> Report:
    """Report the largest number of workers, and each of them under ``by_workers``."""
    most = max(found)
    ours = {workers: figures(here, workers) for workers, here in found.items()}
    against = {workers: ratios(here) for workers, here in found.items()}
    return Report(
        benchmark="control_plane",
        floor={
            "fsync_ms": median(fsync_ms()),
            "by_workers": {str(workers): _floor(here, workers) for workers, here in found.items()},
        },
        peers={peer: _peer(peer, found) for peer in (TCPSTORE, GRPC)},
        ours={**ours[most], "workers_count": most, "by_workers": {str(n): each for n, each in ours.items()}},
        ratios={**against[most], "by_workers": {str(n): each for n, each in against.items()}},
    )


def _p99(values: list[float]) -> float:
    return rounded(sorted(values)[min(len(values) - 1, int(len(values) * 0.99))])


def _floor(found: Found, workers: int) -> dict[str, float]:
    deaths_ms = [one * 1e3 for each in found.losses for one in each.death_s]
    return {
        "router_form_s": median([one.form_s for one in found.bare]),
        "router_cpu_us_per_registration": median([one.form_cpu_s / workers * 1e6 for one in found.bare]),
        "router_admitted_cpu_us": median([one.admit_cpu_s / workers * 1e6 for one in found.bare]),
        "router_echo_s": median(found.echo_s),
        "router_heartbeat_cpu_us": median([_beat_us(one) for one in found.bare]),
        "pub_told_all_ms": median([one * 1e3 for one in found.publish_s]),
        "router_told_all_ms": median([one.told_s * 1e3 for one in found.bare]),
        "death_seen_ms": median(deaths_ms),
        "death_seen_p99_ms": _p99(deaths_ms),
        "storm_back_s": median([one.back_s for one in found.bare]),
    }


def _peer(peer: str, found: dict[int, Found]) -> dict[str, dict[str, float | None]] | str:
    if importlib.util.find_spec(PEER_MODULES[peer]) is None:
        return MISSING
    times = {workers: here.peers_s.get(peer) for workers, here in found.items()}
    return {"form_s": {str(workers): median(one) if one else None for workers, one in times.items()}}


def people(document: Report) -> str:
    """Format the figures by number of workers."""
    sizes = list(document.ours["by_workers"])
    rows: list[list[object]] = []
    for title, section in (("floor", document.floor), ("ours", document.ours), ("ratio", document.ratios)):
        by_workers = section["by_workers"]
        for name in dict.fromkeys(name for size in sizes for name in by_workers[size]):
            rows.append([f"{title}: {name}", *(by_workers[size].get(name, "–") for size in sizes)])
    for peer, shown in document.peers.items():
        cells = [MISSING] * len(sizes) if isinstance(shown, str) else [shown["form_s"][size] or "–" for size in sizes]
        rows.append([f"{peer}: form_s", *cells])
    return table(["workers", *sizes], rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.control_plane", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument(
        "--quick", action="store_true", help=f"run {TRIALS_QUICK} trials with at most {WORKERS_QUICK[-1]} workers"
    )
    parser.add_argument("--workers", type=int, nargs="+", help=f"numbers of simulated workers (default: {WORKERS})")
    parser.add_argument("--trials", type=int, help=f"number of trials of each system (default: {TRIALS})")
    parser.add_argument(
        "--clients",
        type=int,
        default=CLIENTS,
        help=f"number of processes that simulate the workers (default: {CLIENTS})",
    )
    parser.add_argument(
        "--etcd",
        action="store_true",
        help="only compare a journal in etcd, whose leaders are killed and suspended, with one in a file",
    )
    parser.add_argument(
        "--standby", action="store_true", help="only measure the takeover by a standby scheduler on etcd"
    )
    parser.add_argument(
        "--relays",
        type=int,
        metavar="N",
        help="only compare the formation of a group behind N relays, also in a tree, with one without relays",
    )
    parser.add_argument(
        "--tree",
        type=int,
        metavar="N",
        help="only measure one job whose hosts of 64 workers are behind N inner relays",
    )
    parser.add_argument(
        "--no-curve",
        action="store_true",
        help="skip the measurements with CLUSTER_SECRET (CURVE and message authentication)",
    )
    arguments = parser.parse_args()
    extent = Extent(
        workers=arguments.workers or (WORKERS_QUICK if arguments.quick else WORKERS),
        trials=arguments.trials or (TRIALS_QUICK if arguments.quick else TRIALS),
        beats_s=BEATS_QUICK_S if arguments.quick else BEATS_S,
        victims=VICTIMS_QUICK if arguments.quick else VICTIMS,
        clients=max(2, arguments.clients),  # one is lost entirely
        curve=not arguments.no_curve,
    )
    connections = -(-max(extent.workers) // RANKS_A_HOST) if arguments.tree else max(extent.workers)
    problem = descriptor_problem(connections, extent.clients)
    if problem is not None:
        sys.exit(problem)
    if arguments.etcd or arguments.standby:
        on_etcd = (
            report_takeovers(measure_takeovers(extent)) if arguments.standby else report_etcd(measure_etcd(extent))
        )
        by_workers = on_etcd.ours["by_workers"]
        names = list(next(iter(by_workers.values())))
        on_etcd.print(
            table(["workers", *by_workers], [[name, *(one[name] for one in by_workers.values())] for name in names])
        )
        return
    variables = {"CLUSTER_SECRET": trials.SECRET} if extent.curve else {}
    if arguments.tree:
        document = measure_tree(list(extent.workers), arguments.tree, extent.clients, extent.beats_s, **variables)
    elif arguments.relays:
        document = report_relays(measure_relays(extent, arguments.relays, **variables), arguments.relays)
    else:
        document = report(measure(extent))
    document.print(people(document))


if __name__ == "__main__":
    main()
