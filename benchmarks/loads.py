"""Loads over hours, in units of one worker's capacity: generated ones, and a recording.

A load has one number per check, ``LOOK_S`` apart: how many workers it would keep busy then. ``changes`` counts its
changes, the start included; fluctuations faster than a policy may follow count as one load. ``benchmarks.autoscale``
sizes jobs for these loads.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path

LOOK_S = 10.0
HOURS = 4
LOOKS = int(HOURS * 3600 / LOOK_S)
RECORDED = Path(__file__).with_name("recorded_load.json")
RECORDED_MOST = 7.0
"""Workers at the busiest time of the recording."""


@dataclass(frozen=True, slots=True)
class Load:
    """A name, the workers it keeps busy at each check, and the number of its changes."""

    name: str
    busy: tuple[float, ...]
    changes: int


def step() -> Load:
    """Return work for two workers, then six, then two."""
    third = LOOKS // 3
    return Load("step", (*[2.0] * third, *[6.0] * third, *[2.0] * (LOOKS - 2 * third)), 3)


def ramp() -> Load:
    """Return a load that rises from one to seven and falls again."""
    half = LOOKS // 2
    return Load("ramp", tuple(1.0 + 6.0 * (1.0 - abs(at - half) / half) for at in range(LOOKS)), 2)


def diurnal() -> Load:
    """Return two shortened days."""
    return Load("diurnal", tuple(4.0 - 3.0 * math.cos(4 * math.pi * at / LOOKS) for at in range(LOOKS)), 4)


def bursty(seed: int = 1) -> Load:
    """Return almost no load, with occasional minutes of heavy load."""
    draw, busy, changes = random.Random(seed), list[float](), 1
    while len(busy) < LOOKS:
        busy += [0.5] * draw.randint(20, 120)
        busy += [draw.uniform(3.0, 7.0)] * draw.randint(12, 60)
        changes += 2
    return Load("bursty", tuple(busy[:LOOKS]), changes)


def noisy(seed: int = 2) -> Load:
    """Return a load that is constant to within a quarter."""
    draw = random.Random(seed)
    return Load("noisy", tuple(3.5 * draw.uniform(0.75, 1.25) for _ in range(LOOKS)), 1)


def sawtooth(period_s: float) -> Load:
    """Return a load that rises and falls repeatedly, at the policy's own waiting time."""
    looks = max(2, round(period_s / LOOK_S))
    busy = tuple(2.0 + 4.0 * (at % looks) / looks for at in range(LOOKS))
    return Load(f"sawtooth of {period_s:g} s", busy, 1)


def constant() -> Load:
    """Return a constant load between two sizes."""
    return Load("constant", (2.5,) * LOOKS, 1)


def batch() -> Load:
    """Return a load with all work at the start."""
    return Load("batch", (2.0 * LOOKS, *[0.0] * (LOOKS - 1)), 2)


def recorded() -> Load:
    """Return how many processes wanted one of a shared machine's two cores each second; a second is a minute here."""
    wanted: list[float] = json.loads(RECORDED.read_text(encoding="utf-8"))
    each = LOOKS // len(wanted)
    return Load("recorded", tuple(RECORDED_MOST * one / max(wanted) for one in wanted for _ in range(each)), 5)


def all_loads(settle_s: float, shrink_after_s: float) -> list[Load]:
    """Return loads of every shape, with sawtooth at the policy's own two periods."""
    teeth = [sawtooth(settle_s), sawtooth(shrink_after_s)]
    return [step(), ramp(), diurnal(), bursty(), noisy(), *teeth, constant(), batch(), recorded()]
