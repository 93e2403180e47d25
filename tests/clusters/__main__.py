"""``python -m tests.clusters [--faults 200] [--seed 1]``: random faults over three hosts; the bits must not change.

Prints each job's faults and finally the violations; the status is 1 if there are any. Needs root and iproute2.
Everything is stored below the current folder, or ``--directory``; a job that failed keeps its logs there.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.clusters import namespaces
from tests.clusters.campaign import Campaign


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.clusters", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--of-a-job", type=int, default=8, help="faults that one job meets")
    parser.add_argument("--seed", type=int, default=1, help="of what is drawn; the moments also depend on the machine")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no job is begun after these")
    parser.add_argument("--directory", type=Path, default=Path())
    arguments = parser.parse_args()
    why_not = namespaces.missing()
    if why_not:
        print(f"hosts cannot be made on this machine: {why_not}")
        return 1
    began_s = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="samebits-clusters-", dir=arguments.directory)).resolve()
    campaign = Campaign(folder, arguments.seed)
    problems: list[str] = []
    try:
        while not problems and (left := arguments.faults - campaign.done.total()) > 0:
            if time.monotonic() - began_s > arguments.seconds:
                break
            problems = campaign.run_job(min(left, arguments.of_a_job))
            print(f"[{time.monotonic() - began_s:6.1f} s] {campaign.done.total()} faults", flush=True)
    finally:
        campaign.close()
    for problem in problems:
        print(problem)
    if not problems:
        shutil.rmtree(folder)
    print(f"{campaign.done.total()} faults, seed {arguments.seed}: {dict(campaign.done)}; {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
