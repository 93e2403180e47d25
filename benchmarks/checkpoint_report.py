"""Evaluate the checkpoint benchmark's samples: names, ratios, report and table.

A ratio is the median of the ratios within one round, in which both sides had the same conditions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.report import MISSING, Report, median, rounded, spread, table

MIB = 1024**2
GIB = 1024**3
UNITS = {"MB": MIB, "GB": GIB}

MEMCPY, DISK = FLOORS = ("memcpy", "write_fsync")
WRITER = "bare_writer"  # the floor of training's loss of speed during a save
PEERS = ("torch_save", "safetensors", "dcp", "dcp_async")
OURS, MEMORY = "ours", "memory"
SAVING = (*FLOORS, *PEERS, OURS)
LOADING = (MEMCPY, "torch_save", "safetensors", "dcp", OURS)
TRAINING = (WRITER, "dcp_async", OURS)
CORES = ("spare", "shared")
SHOWN = {
    MEMCPY: "memcpy",
    DISK: "write + fsync",
    WRITER: "a process that only writes",
    "torch_save": "torch.save + fsync + rename",
    "safetensors": "safetensors + fsync + rename",
    "dcp": "DCP save",
    "dcp_async": "DCP async, cached stager",
    OURS: "SameBits",
    MEMORY: "SameBits, from memory",
}
COLUMNS = (
    "blocked ms",
    "÷ memcpy",
    "durable ms",
    "÷ write+fsync",
    "CPU s/GiB",
    "load ms",
    "÷ memcpy",
    "steps, spare core",
    "shared core",
)

Sample = Mapping[str, float | None]


@dataclass(slots=True)
class Samples:
    """All measurements of one size, round by round; empty for a way that is not installed."""

    saves: dict[str, list[Sample]] = field(default_factory=lambda: {way: [] for way in SAVING})
    loads: dict[str, list[Sample]] = field(default_factory=lambda: {way: [] for way in LOADING})
    memory: dict[str, list[Sample]] = field(default_factory=lambda: {way: [] for way in (MEMCPY, MEMORY)})
    training: dict[tuple[str, str], list[Sample]] = field(
        default_factory=lambda: {(way, cores): [] for way in TRAINING for cores in CORES}
    )

    def steps_ratio(self, way: str, cores: str) -> float | None:
        """Return the median of (steps per second during a save ÷ undisturbed); None if no save lasted for a step."""
        pairs = [(sample["during_per_s"], sample["undisturbed_per_s"]) for sample in self.training[way, cores]]
        ratios = [during / rest for during, rest in pairs if during is not None and rest]
        return median(ratios) if ratios else None


def size_in_bytes(text: str) -> int:
    """Parse ``64MB`` or ``2GB``; MB and GB are powers of 1024."""
    match = re.fullmatch(r"([1-9]\d*)(MB|GB)", text)
    if match is None:
        raise ValueError(f"size {text!r}: expected a number and MB or GB, as in 64MB")
    return int(match[1]) * UNITS[match[2]]


def report(measured: Mapping[str, Samples]) -> Report:
    """Report the samples by size."""
    return Report(
        benchmark="checkpoint",
        floor={size: _floor(size, samples) for size, samples in measured.items()},
        peers={way: _peer(measured, way) for way in PEERS},
        ours={size: _ours(size, samples) for size, samples in measured.items()},
        ratios={size: _ratios(samples) for size, samples in measured.items()},
    )


def _floor(size: str, samples: Samples) -> dict[str, float]:
    return {
        "state_bytes": size_in_bytes(size),
        "memcpy_s": median(_values(samples.saves[MEMCPY], "blocked_s")),
        "write_fsync_s": median(_values(samples.saves[DISK], "durable_s")),
    }


def _peer(measured: Mapping[str, Samples], way: str) -> dict[str, dict[str, float]] | str:
    if not all(samples.saves[way] for samples in measured.values()):
        return MISSING
    return {size: _figures(size, samples, way) for size, samples in measured.items()}


def _figures(size: str, samples: Samples, way: str) -> dict[str, float]:
    found = {name: median(_values(samples.saves[way], name)) for name in ("blocked_s", "durable_s")}
    found["cpu_s_per_gib"] = _per_gib(size, samples, way, "cpu_s")
    if way in samples.loads:
        found["load_s"] = median(_values(samples.loads[way], "load_s"))
    return found


def _ours(size: str, samples: Samples) -> dict[str, float]:
    return {
        **_figures(size, samples, OURS),
        "writer_cpu_s_per_gib": _per_gib(size, samples, OURS, "writer_cpu_s"),
        "restore_from_memory_s": median(_values(samples.memory[MEMORY], "load_s")),
    }


def _ratios(samples: Samples) -> dict[str, object]:
    return {
        **_ratios_of(samples, OURS),
        "memory": _ratio(samples.memory, MEMORY, MEMCPY, "load_s"),
        "floor": _steps_ratios_of(samples, WRITER),
        "peers": {way: _ratios_of(samples, way) for way in PEERS if samples.saves[way]},
    }


def _ratios_of(samples: Samples, way: str) -> dict[str, float | None]:
    found: dict[str, float | None] = {
        "blocked": _ratio(samples.saves, way, MEMCPY, "blocked_s"),
        "durable": _ratio(samples.saves, way, DISK, "durable_s"),
    }
    if way in samples.loads:
        found["load"] = _ratio(samples.loads, way, MEMCPY, "load_s")
    if way in TRAINING:
        found |= _steps_ratios_of(samples, way)
    return found


def _steps_ratios_of(samples: Samples, way: str) -> dict[str, float | None]:
    return {f"steps_{cores}": samples.steps_ratio(way, cores) for cores in CORES}


def _ratio(samples: Mapping[str, Sequence[Sample]], way: str, floor: str, figure: str) -> float:
    """Return the median of (way ÷ floor) within one round."""
    pairs = zip(_values(samples[way], figure), _values(samples[floor], figure), strict=True)
    return median([one / other for one, other in pairs])


def _values(samples: Sequence[Sample], figure: str) -> list[float]:
    return [value for sample in samples if (value := sample[figure]) is not None]


def _per_gib(size: str, samples: Samples, way: str, figure: str) -> float:
    return rounded(median(_values(samples.saves[way], figure)) / (size_in_bytes(size) / GIB))


# --- tables -----------------------------------------------------------------------------------------------------------


def people(measured: Mapping[str, Samples]) -> str:
    return "\n\n".join(_people(size, samples) for size, samples in measured.items())


def _people(size: str, samples: Samples) -> str:
    header = [f"{size}, {len(samples.saves[OURS])} rounds", *COLUMNS]
    restored = _ms(samples.memory[MEMORY], "load_s")
    ratio = _shown(_ratio(samples.memory, MEMORY, MEMCPY, "load_s"))
    rows: list[Sequence[object]] = [
        *(_row(size, samples, way) for way in SAVING),
        [SHOWN[WRITER], *[""] * 7, *map(_shown, _steps_ratios_of(samples, WRITER).values())],
        [SHOWN[MEMORY], *[""] * 5, restored, ratio, "", ""],
    ]
    writer = f"{_per_gib(size, samples, OURS, 'writer_cpu_s'):.2f}"
    return f"{table(header, rows)}\nof SameBits' CPU time that of its writer: {writer} s per GiB"


def _row(size: str, samples: Samples, way: str) -> list[object]:
    saves, loads = samples.saves[way], samples.loads.get(way)
    if not saves:
        return [SHOWN[way], MISSING, *[""] * (len(COLUMNS) - 1)]
    ratios = _ratios_of(samples, way)
    return [
        SHOWN[way],
        _ms(saves, "blocked_s"),
        _shown(ratios["blocked"]),
        *(["", ""] if way == MEMCPY else [_ms(saves, "durable_s"), _shown(ratios["durable"])]),
        f"{_per_gib(size, samples, way, 'cpu_s'):.2f}",
        "" if loads is None else _ms(loads, "load_s"),
        *(_shown(ratios.get(name)) for name in ("load", *(f"steps_{cores}" for cores in CORES))),
    ]


def _ms(samples: Sequence[Sample], figure: str) -> str:
    return str(spread([value * 1e3 for value in _values(samples, figure)]))


def _shown(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"
