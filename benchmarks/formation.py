"""Measure the time from the last registration to a rank in every worker and to a usable group, beside torch's own.

``python -m benchmarks.formation [--quick]``. The workers of both sides have imported everything when they are released
at one barrier; their servers (our scheduler; rank 0's TCPStore) already listen. *Rank known* runs from when the last
worker sends its registration until every worker has received its generation and its rank. *Group ready* runs from the
same time until the sum of one float is back on every rank; for torch's ``init_process_group``, which is given its
ranks, from the last rank's call. Trials of both alternate at each world size.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields

from benchmarks.processes import Job, Stage, free_port, wait_until_listening, worker_module, worker_name
from benchmarks.report import Progress, Report, median, rounded, spread, table

WORLD_SIZES = (2, 4, 8, 16)
WORLD_SIZES_QUICK = (2, 4)
TRIALS = 7
TRIALS_QUICK = 5
WITHIN_S = 120.0
SETTLE_S = 0.3  # between the last import and the release, so that the cores are free
PLAIN = "init_process_group"
FLOOR_SAMPLES = 50
_GREETING = b"x" * 64


@dataclass(frozen=True, slots=True)
class Formation:
    """One formation of ours: milliseconds from the last registration until the last worker reached each point."""

    seat_known_ms: float
    """``samebits.init()`` is done except for its group of one"""
    waits_ms: float
    """the worker is in the rendezvous, with its checkpoint folder claimed and locked"""
    rank_known_ms: float
    group_formed_ms: float
    group_ready_ms: float
    training_ms: float
    """the user's function runs, its state durable and equal on all ranks"""
    from_init_ms: float
    """not included above: from the last worker's call of ``samebits.init()`` to the last registration"""


@dataclass(frozen=True, slots=True)
class PlainFormation:
    """One formation of torch's: milliseconds from the last rank's call until the last rank reached each point."""

    group_formed_ms: float
    group_ready_ms: float


@dataclass(slots=True)
class Trials:
    """All measurements, by world size."""

    ours: dict[int, list[Formation]] = field(default_factory=dict)
    plain: dict[int, list[PlainFormation]] = field(default_factory=dict)
    fsync_ms: list[float] = field(default_factory=list)
    round_trip_ms: list[float] = field(default_factory=list)


# --- one trial --------------------------------------------------------------------------------------------------------


def form_ours(world_size: int) -> Formation:
    with Stage() as stage:
        job = Job(stage, "formation", world_size)
        job.start_scheduler()
        workers = [job.start_worker(slot, "ours", gated=True) for slot in range(world_size)]
        _wait_for_all(stage, "waits", world_size)
        time.sleep(SETTLE_S)
        _release(workers)
        _wait_for_all(stage, "trains", world_size)
        registered_s = _last(stage, "registers")

        def since_ms(name: str) -> float:
            return (_last(stage, name) - registered_s) * 1e3

        return Formation(
            seat_known_ms=since_ms("seated"),
            waits_ms=since_ms("enters"),
            rank_known_ms=since_ms("placed"),
            group_formed_ms=since_ms("formed"),
            group_ready_ms=since_ms("ready"),
            training_ms=since_ms("trains"),
            from_init_ms=-since_ms("begins"),
        )


def form_plain(world_size: int) -> PlainFormation:
    with Stage() as stage:
        port = free_port()
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size)}
        command = [*worker_module("formation"), "plain"]
        ranks = [
            stage.start(worker_name(rank), command, {**shared, "RANK": str(rank)}, gated=True)
            for rank in range(world_size)
        ]
        _wait_for_all(stage, "waits", world_size)
        time.sleep(SETTLE_S)
        # A client that finds no listener retries only half a second later, which must not be measured.
        _release(ranks[:1])
        wait_until_listening(port, stage)
        _release(ranks[1:])
        _wait_for_all(stage, "ready", world_size)
        began_s = _last(stage, "begins")
        return PlainFormation(
            group_formed_ms=(_last(stage, "formed") - began_s) * 1e3,
            group_ready_ms=(_last(stage, "ready") - began_s) * 1e3,
        )


def _release(workers: Sequence[subprocess.Popen[bytes]]) -> None:
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.close()


def _wait_for_all(stage: Stage, name: str, world_size: int) -> None:
    stage.channel.wait_for(
        lambda: len({moment.pid for moment in stage.channel.select(name)}) == world_size,
        WITHIN_S,
        f"{name!r} in {world_size} workers",
    )


def _last(stage: Stage, name: str) -> float:
    return max(moment.at_s for moment in stage.channel.select(name))


# --- the floor --------------------------------------------------------------------------------------------------------


def fsync_ms() -> list[float]:
    """Append a record of the journal's size and make it durable, in the journal's folder."""
    with Stage() as stage:
        descriptor = os.open(stage.folder / "journal", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

        def append() -> None:
            os.write(descriptor, bytes(256))
            os.fsync(descriptor)

        sample = [_timed_ms(append) for _ in range(FLOOR_SAMPLES)]
        os.close(descriptor)
        return sample


def round_trip_ms() -> list[float]:
    """Send 64 bytes back and forth between two threads over loopback TCP."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        echo = threading.Thread(target=_echo, args=(server,))
        echo.start()
        with socket.create_connection(server.getsockname()) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

            def greet() -> None:
                connection.sendall(_GREETING)
                connection.recv(len(_GREETING), socket.MSG_WAITALL)

            sample = [_timed_ms(greet) for _ in range(FLOOR_SAMPLES)]
        echo.join()
    return sample


def _echo(server: socket.socket) -> None:
    connection, _ = server.accept()
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while said := connection.recv(len(_GREETING), socket.MSG_WAITALL):
            connection.sendall(said)


def _timed_ms(call: Callable[[], None]) -> float:
    began_s = time.monotonic()
    call()
    return (time.monotonic() - began_s) * 1e3


# --- the run ----------------------------------------------------------------------------------------------------------


def measure(trials: int, world_sizes: Sequence[int]) -> Trials:
    progress, found = Progress("the floor: fsync and a round trip over loopback"), Trials()
    found.round_trip_ms = round_trip_ms()
    found.fsync_ms = fsync_ms()
    progress.say(
        f"floor: fsync {spread(found.fsync_ms)} ms, loopback round trip {spread(found.round_trip_ms)} ms; "
        f"{trials} pairs of formations at {', '.join(map(str, world_sizes))} workers follow"
    )
    for world_size in world_sizes:
        ours, plain = found.ours.setdefault(world_size, []), found.plain.setdefault(world_size, [])
        for trial in range(trials):
            if trial % 2:
                ours.append(form_ours(world_size))
                plain.append(form_plain(world_size))
            else:
                plain.append(form_plain(world_size))
                ours.append(form_ours(world_size))
        progress.say(
            f"{world_size} workers: rank known after {spread([one.rank_known_ms for one in ours])} ms, "
            f"group ready after {spread([one.group_ready_ms for one in ours])} ms, "
            f"plain {spread([one.group_ready_ms for one in plain])} ms"
        )
    return found


def report(trials: Trials) -> Report:
    sizes = [*trials.ours]

    def ours(name: str, world_size: int) -> float:
        return median([float(getattr(one, name)) for one in trials.ours[world_size]])

    def plain(name: str, world_size: int) -> float:
        return median([float(getattr(one, name)) for one in trials.plain[world_size]])

    def by_world_size(figure: Callable[[int], float]) -> dict[str, float]:
        return {str(world_size): rounded(figure(world_size)) for world_size in sizes}

    return Report(
        benchmark="formation",
        floor={"fsync_ms": median(trials.fsync_ms), "loopback_round_trip_ms": median(trials.round_trip_ms)},
        peers={PLAIN: _figures(PlainFormation, plain, sizes)},
        ours=_figures(Formation, ours, sizes),
        ratios={
            "group_ready_vs_plain": by_world_size(lambda n: ours("group_ready_ms", n) / plain("group_ready_ms", n)),
            "group_after_rank_vs_plain": by_world_size(
                lambda n: (ours("group_ready_ms", n) - ours("rank_known_ms", n)) / plain("group_ready_ms", n)
            ),
        },
    )


def _figures(
    kind: type[Formation] | type[PlainFormation], figure: Callable[[str, int], float], sizes: Sequence[int]
) -> Mapping[str, Mapping[str, float]]:
    return {one.name: {str(world_size): figure(one.name, world_size) for world_size in sizes} for one in fields(kind)}


def people(trials: Trials) -> str:
    ratios = report(trials).ratios
    rows: list[list[object]] = []
    for world_size, ours in trials.ours.items():
        columns = [[float(getattr(one, name)) for one in ours] for name in _SHOWN]
        plain = [one.group_ready_ms for one in trials.plain[world_size]]
        whole = ratios["group_ready_vs_plain"][str(world_size)]
        group = ratios["group_after_rank_vs_plain"][str(world_size)]
        rows.append([world_size, *(spread(column) for column in columns), spread(plain), whole, group])
    header = ["workers", *_SHOWN.values(), PLAIN, "ready ÷ plain", "group alone ÷ plain"]
    return f"ms from the last registration: median (lowest–highest)\n{table(header, rows)}"


_SHOWN = {
    "seat_known_ms": "seated",
    "waits_ms": "in the rendezvous",
    "rank_known_ms": "rank known",
    "group_ready_ms": "group ready",
    "training_ms": "training",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.formation", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help=f"run {TRIALS_QUICK} pairs with at most 4 workers")
    parser.add_argument("--trials", type=int, help=f"pairs at each world size (default: {TRIALS})")
    parser.add_argument("--world-sizes", type=int, nargs="+", help=f"numbers of workers (default: {WORLD_SIZES})")
    arguments = parser.parse_args()
    trials = arguments.trials or (TRIALS_QUICK if arguments.quick else TRIALS)
    world_sizes = arguments.world_sizes or (WORLD_SIZES_QUICK if arguments.quick else WORLD_SIZES)
    found = measure(trials, world_sizes)
    report(found).print(people(found))


if __name__ == "__main__":
    main()
