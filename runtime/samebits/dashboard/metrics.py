"""Format the job's metrics as Prometheus text, from the same values as the page.

Nothing is counted here: all numbers are sums over the events, so they survive a restart of this server. The names
follow prometheus.io/docs/practices/naming and instrumenting/exposition_formats.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def exposition(state: Mapping[str, Any]) -> str:
    """Return the complete text for a ``JobWatch.state``."""
    return "".join(f"{line}\n" for line in _lines(state))


def _lines(state: Mapping[str, Any]) -> Iterable[str]:
    job = state["job"] or {}
    yield from _metric("samebits_up", "gauge", "Whether the job's scheduler answers.", [({}, int(state["linked"]))])
    if job:
        labels = {"job_id": job["id"], "name": job["name"]}
        yield from _metric("samebits_job_info", "gauge", "The job, in its labels.", [(labels, 1)])
        for name, kind, text, value in (
            ("step", "gauge", "Completed optimizer steps.", job["step"]),
            ("generation", "gauge", "Number of the last committed membership.", job["generation"]),
            ("scheduler_starts_total", "counter", "Scheduler starts.", job["term"]),
            ("world_size", "gauge", "Workers in the current world.", job["world_size"]),
            ("workers_alive", "gauge", "Workers of the world that hold their lease.", job["alive"]),
            ("spares_alive", "gauge", "Spares that hold their lease.", job["spares_alive"]),
            ("finished", "gauge", "Whether the job is finished.", int(job["finished"])),
        ):
            yield from _metric(f"samebits_{name}", kind, text, [({}, value)])
    yield from _metric("samebits_recoveries_total", "counter", "Recoveries.", [({}, state["recovery_count"])])
    yield from _metric("samebits_losses_total", "counter", "Processes that were lost.", [({}, state["losses"])])
    spent = [({"bucket": bucket}, seconds) for bucket, seconds in state["buckets_s"].items()]
    yield from _metric("samebits_time_seconds_total", "counter", "Wall time by use.", spent)
    if state["goodput"] is not None:
        yield from _metric("samebits_goodput_ratio", "gauge", "Share of productive time.", [({}, state["goodput"])])
    if state["committed_step"] is not None:
        text = "Step of the newest point on every member's disk."
        yield from _metric("samebits_committed_step", "gauge", text, [({}, state["committed_step"])])
        text = "Time of that commit, in seconds since 1970."
        yield from _metric("samebits_committed_timestamp_seconds", "gauge", text, [({}, state["committed_at"])])
    last = next((row for row in reversed(state["recoveries"]) if row["total_ms"] is not None), None)
    if last is not None:
        seconds = [({"phase": phase}, ms / 1000) for phase, ms in last["phases_ms"].items()]
        yield from _metric("samebits_last_recovery_seconds", "gauge", "The last recovery, by phase.", seconds)
    hosts = sorted({rank["host"] for rank in state["ranks"]})
    ill = [({"host": host}, sum(one.startswith(f"host {host}: ") for one in state["ailments"])) for host in hosts]
    text = "Health warnings of the host and its devices."
    yield from _metric("samebits_host_ailments", "gauge", text, ill if state["linked"] else [])
    ranks = [
        ({"node": rank["node"], "slot": str(rank["slot"])}, rank) for rank in state["ranks"] if rank["role"] == "worker"
    ]
    steps = [(labels, rank["step"]) for labels, rank in ranks]
    yield from _metric("samebits_worker_step", "gauge", "Steps that the worker has reported.", steps)
    figures = [({**labels, "figure": name}, value) for labels, rank in ranks for name, value in rank["figures"].items()]
    yield from _metric("samebits_worker_figure", "gauge", "Values that the worker measures, by name.", figures)
    alive = [(labels, int(rank["state"] == "alive")) for labels, rank in ranks]
    yield from _metric("samebits_worker_alive", "gauge", "Whether the worker holds its lease.", alive)


def _metric(name: str, kind: str, text: str, samples: Iterable[tuple[Mapping[str, str], float]]) -> Iterable[str]:
    told = list(samples)
    if not told:
        return
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"
    for labels, value in told:
        inside = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
        yield f"{name}{{{inside}}} {value!r}" if inside else f"{name} {value!r}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
