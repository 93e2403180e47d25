"""Loads over hours, as shares of what one worker does: drawn ones, and one that was recorded.

Here live the shapes. Never here: who is sized by them (``benchmarks.autoscale``). A load is one number for every look,
``LOOK_S`` apart: how many workers it would keep busy just then. ``changes`` is how often it becomes another one, its
beginning included; what goes to and fro faster than a policy may follow is one load.
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
"""Workers that the busiest moment of the recording stands for."""


@dataclass(frozen=True, slots=True)
class Load:
    """A name, the workers that it keeps busy at each look, and how often it changes."""

    name: str
    busy: tuple[float, ...]
    changes: int


def step() -> Load:
    """Two workers' work, then six, then two."""
    third = LOOKS // 3
    return Load("step", (*[2.0] * third, *[6.0] * third, *[2.0] * (LOOKS - 2 * third)), 3)


def ramp() -> Load:
    """Up from one to seven and down again."""
    half = LOOKS // 2
    return Load("ramp", tuple(1.0 + 6.0 * (1.0 - abs(at - half) / half) for at in range(LOOKS)), 2)


def diurnal() -> Load:
    """Two days in little."""
    return Load("diurnal", tuple(4.0 - 3.0 * math.cos(4 * math.pi * at / LOOKS) for at in range(LOOKS)), 4)


def bursty(seed: int = 1) -> Load:
    """Nearly nothing, and now and then minutes of a lot."""
    draw, busy, changes = random.Random(seed), list[float](), 1
    while len(busy) < LOOKS:
        busy += [0.5] * draw.randint(20, 120)
        busy += [draw.uniform(3.0, 7.0)] * draw.randint(12, 60)
        changes += 2
    return Load("bursty", tuple(busy[:LOOKS]), changes)


def noisy(seed: int = 2) -> Load:
    """The same all the time, give or take a quarter."""
    draw = random.Random(seed)
    return Load("noisy", tuple(3.5 * draw.uniform(0.75, 1.25) for _ in range(LOOKS)), 1)


def sawtooth(period_s: float) -> Load:
    """Up and down again and again, as long as a policy waits before it changes anything."""
    looks = max(2, round(period_s / LOOK_S))
    busy = tuple(2.0 + 4.0 * (at % looks) / looks for at in range(LOOKS))
    return Load(f"sawtooth of {period_s:g} s", busy, 1)


def constant() -> Load:
    """Between two sizes, all the time."""
    return Load("constant", (2.5,) * LOOKS, 1)


def batch() -> Load:
    """All the work is there at the beginning."""
    return Load("batch", (2.0 * LOOKS, *[0.0] * (LOOKS - 1)), 2)


def recorded() -> Load:
    """How many processes wanted one of two cores of a shared machine, a second each; a second is a minute here."""
    wanted: list[float] = json.loads(RECORDED.read_text(encoding="utf-8"))
    each = LOOKS // len(wanted)
    return Load("recorded", tuple(RECORDED_MOST * one / max(wanted) for one in wanted for _ in range(each)), 5)


def all_loads(settle_s: float, shrink_after_s: float) -> list[Load]:
    """Of every shape; sawtooth at the policy's own two periods."""
    teeth = [sawtooth(settle_s), sawtooth(shrink_after_s)]
    return [step(), ramp(), diurnal(), bursty(), noisy(), *teeth, constant(), batch(), recorded()]
