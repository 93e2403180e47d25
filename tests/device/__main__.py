"""``python -m tests.device [--quick] [--made-up] [--stops] [--only CHECK ...]``: check the device of this machine.

Looks for a GPU, then an NPU. If there is neither, or with ``--made-up``, everything runs on a simulated device
(``tests.device.backend``), and checks that need a card report "not on this device". It needs no network. It prints each
result at once, with card, driver and torch, then one JSON object; the status is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.device.checks import CHECKS, QUICK, SHARING, WHOLE, Extent, Found, Verdict
from tests.device.here import Here, look


def main() -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.device", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer cycles, a smaller state")
    parser.add_argument("--made-up", action="store_true", help="not on the card that is here")
    parser.add_argument("--stops", action="store_true", help="the made-up device is stopped as Ascend's is")
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=list(CHECKS), help="default: all")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that its jobs end with it
    folder = Path(tempfile.mkdtemp(prefix="samebits-device-"))
    try:
        here = look(folder, made_up=options.made_up or options.stops, stops=options.stops)
        found = run(here, folder, options.only, quick=options.quick)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(report(here, found)))
    return int(any(one.verdict is Verdict.FAILED for one in found))


def run(here: Here, folder: Path, checks: list[str], *, quick: bool) -> list[Found]:
    """Run each check in turn and print its result."""
    began_s, found = time.monotonic(), []
    print(f"on {here.said()}", flush=True)
    for name in checks:
        check = CHECKS[name]
        if name in SHARING and "sharing" not in here.has:
            check = _one_rank_only
        for one in check(here, folder / name, QUICK if quick else WHOLE):
            found.append(one)
            at_s = time.monotonic() - began_s
            print(f"[{at_s:6.1f} s] {one.verdict.value}: {one.check}: {one.text} ({here.said()})", flush=True)
    return found


def _one_rank_only(here: Here, folder: Path, extent: Extent) -> Iterator[Found]:
    """Return why the device accepts only one rank while no other backend accepts its tensors."""
    yield Found(folder.name, Verdict.NOT_HERE, f"{here.kind} takes one rank a device")


def report(here: Here, found: list[Found]) -> dict[str, object]:
    """Return the JSON object."""
    counts = {verdict.name.lower(): sum(one.verdict is verdict for one in found) for verdict in Verdict}
    return {
        "device": here.kind,
        "card": here.card,
        "driver": here.driver,
        "torch": here.torch_version,
        **counts,
        "checks": [
            {"check": one.check, "verdict": one.verdict.value, "text": one.text, "figures": one.figures}
            for one in found
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
