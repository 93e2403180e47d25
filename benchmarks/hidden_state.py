"""Measure the training thread's CPU time for HIDDEN_STATE=tell, once per job, and for weights swapped via ``.data``.

``python -m benchmarks.hidden_state [--quick]``. The same script in a world of one runs in new processes with
HIDDEN_STATE=off and tell in turn, through the commits at which the analysis happens; the setup of ``elastic.run`` is
part of both. Each figure is the difference of a pair. Then, in a model of 1 million parameters, every second step swaps
averaged weights in and out through ``.data``, so that SameBits copies them; ``bare`` is the swap alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks.report import Progress, Report, median, rounded, spread, table

WORKER = Path(__file__).with_name("workers") / "hidden_state.py"
PAIRS, PAIRS_QUICK = 10, 2
PROMISED_MS = 50.0


def run(hidden_state: str, *words: str) -> dict[str, float]:
    """Run the worker in a folder of its own; return what it printed last."""
    kept = ("PATH", "HOME", "TMPDIR", "PYTHONPATH", "VIRTUAL_ENV")
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    environment |= {"HIDDEN_STATE": hidden_state, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="samebits-hidden-") as folder:
        words = (sys.executable, str(WORKER), *words)
        done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    told: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return told


def report(off_ms: list[float], tell_ms: list[float], swaps: Mapping[str, float]) -> Report:
    """Report the figures; the floor is off, and the swap in a model outside any state."""
    extra = spread([one - other for one, other in zip(tell_ms, off_ms, strict=True)])
    step_ms, swap_ms, bare_ms = swaps["step_ms"], swaps["swap_ms"], swaps["bare_ms"]
    ours = {
        "tell_extra_ms": rounded(extra.median),
        "tell_extra_highest_ms": rounded(extra.highest),
        "copies_of_a_swap_ms": rounded(swap_ms - step_ms - bare_ms),
    }
    floor = {"off_ms": median(off_ms), "step_ms": rounded(step_ms), "bare_swap_ms": rounded(bare_ms)}
    return Report("hidden_state", floor, {}, ours, {"tell_vs_promised": rounded(extra.median / PROMISED_MS)})


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.hidden_state",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help=f"run {PAIRS_QUICK} pairs of jobs instead of {PAIRS}")
    options = parser.parse_args()
    pairs = PAIRS_QUICK if options.quick else PAIRS
    progress = Progress(f"HIDDEN_STATE=tell and off in {pairs} pairs of jobs")
    off_ms: list[float] = []
    tell_ms: list[float] = []
    for number in range(pairs):
        for one in ("off", "tell") if number % 2 else ("tell", "off"):
            (tell_ms if one == "tell" else off_ms).append(run(one)["tell_ms"])
        progress.say(f"pair {number + 1}: off {off_ms[-1]:.1f} ms, tell {tell_ms[-1]:.1f} ms")
    swaps = run("tell", "--swap")
    found = report(off_ms, tell_ms, swaps)
    rows = [(name, f"{value:g}") for name, value in {**found.floor, **found.ours}.items()]
    found.print(f"{table(('CPU time of the training thread', 'ms'), rows)}\n(wanted: {PROMISED_MS:g} ms or less once)")


if __name__ == "__main__":
    main()
