"""``python -m tests.foreign.line_kills --kills 300 --seed 1``: kill public-style scripts at random lines.

Each kill is a line of output. It must end with the undisturbed run's bits, or with a message and a nonzero exit status;
the command's own status is 1 if any does neither. The folder of a failed case is kept.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.foreign.line_kills.campaign import SCRIPTS, Campaign
from tests.system.processes import WarmStarter


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.foreign.line_kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no further kill after so many")
    parser.add_argument("--only", nargs="+", default=[], metavar="SCRIPT", help="names without .py")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    scripts = [path for path in SCRIPTS if not options.only or path.stem in options.only]
    folder = Path(tempfile.mkdtemp(prefix="samebits-line-kills-"))
    outcomes: collections.Counter[str] = collections.Counter()
    wrong = []
    began_s = time.monotonic()
    starter = WarmStarter()
    try:
        campaign = Campaign(folder, starter)
        for kill in campaign.draws(random.Random(options.seed), scripts):
            if outcomes.total() - outcomes["not reached"] >= options.kills:
                break
            if time.monotonic() - began_s > options.seconds:
                break
            verdict = campaign.run(kill)
            outcomes[verdict.outcome] += 1
            print(f"[{time.monotonic() - began_s:6.1f} s] {kill}: {verdict.outcome} {verdict.detail}", flush=True)
            wrong += [str(kill)] if verdict.is_wrong else []
            if not verdict.is_wrong:
                campaign.forget()
    finally:
        starter.close()
    print(json.dumps({"seed": options.seed, "outcomes": outcomes, "wrong": wrong}))
    if wrong:
        print(f"the jobs that went wrong are in {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
