"""``python -m tests.causes --count 200 --seed S``: inject this many faults and check how each was named.

Every fault is a line, and the last line is one JSON object. The exit status is 1 if any was named wrongly.
``--seconds`` stops after a while and reports how many faults were injected, so that a long campaign can be run in parts
with different seeds.
"""

from __future__ import annotations

import argparse
import collections
import json
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.causes.campaign import plan_of, run


def main() -> int:
    """Run the campaign."""
    parser = argparse.ArgumentParser(prog="python -m tests.causes", description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--only", nargs="+", default=[], metavar="FAULT", help="names, two at once joined by +")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # its job ends with it
    given: collections.Counter[str] = collections.Counter()
    wrong: list[str] = []
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="samebits-causes-") as folder:
        for trial in run(Path(folder), plan_of(options.count, options.seed, options.only), options.seed):
            name = "+".join(trial.faults)
            given[name] += 1
            verdict = f"WRONG: {trial.wrong}" if trial.wrong else "right"
            print(f"{sum(given.values())} of {options.count}: {name}, {trial.took_s:.1f} s: {verdict}", flush=True)
            wrong += [f"{name}: {trial.wrong}"] if trial.wrong else []
            if time.monotonic() - began_s > options.seconds:
                break
    right = sum(given.values()) - len(wrong)
    print(json.dumps({"seed": options.seed, "right": right, "wrong": wrong, "given": dict(sorted(given.items()))}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
