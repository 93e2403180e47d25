"""``python -m tests.device [--card] [--quick] [--made-up] [--stops] [--only CHECK ...]``: check this machine's device.

Looks for a GPU, then an NPU. If there is neither, or with ``--made-up``, everything runs on a simulated device
(``tests.device.backend``), and checks that need a card report "not on this device". It needs no network. It prints each
result at once, with card, driver and torch, then one JSON object; the status is 1 if anything failed.

``--card`` is for the first minutes with one card: the most telling checks first, and never longer than CARD_WITHIN_S.
Checks that were not reached by then are counted apart.
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

from samebits.training.group import device as devices
from tests.device.checks import CARD, CARD_CHECKS, CHECKS, QUICK, SHARING, WHOLE, Check, Extent, Found, Verdict
from tests.device.here import Here, connected, look

CARD_WITHIN_S = 235.0
"""240 s, less what ending the job that runs then may take."""


class TimeIsUpError(BaseException):
    """Raised by the alarm in the check that runs; no check catches it, and each ends its processes."""


def main() -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.device", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--card", action="store_true", help=f"the most telling checks, in {CARD_WITHIN_S:g} s at most")
    parser.add_argument("--quick", action="store_true", help="fewer cycles, a smaller state")
    parser.add_argument("--made-up", action="store_true", help="not on the card that is here")
    parser.add_argument("--stops", action="store_true", help="the made-up device is stopped as Ascend's is")
    parser.add_argument("--only", nargs="+", choices=[*CHECKS, *CARD_CHECKS], help="default: all")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that its jobs end with it
    folder = Path(tempfile.mkdtemp(prefix="samebits-device-"))
    began_s = time.monotonic()
    checks = CARD_CHECKS if options.card else CHECKS
    pending = {name: (CHECKS | CARD_CHECKS)[name] for name in options.only or checks}
    extent = CARD if options.card else QUICK if options.quick else WHOLE
    choice = ""
    found: list[Found] = []
    try:
        here = look(folder, made_up=options.made_up or options.stops, stops=options.stops)
        print(f"on {here.said()}", flush=True)
        if options.card:
            signal.signal(signal.SIGALRM, _time_is_up)
            signal.setitimer(signal.ITIMER_REAL, CARD_WITHIN_S - (time.monotonic() - began_s))
            here, choice = connected(here, folder)
            print(f"connected: {choice}", flush=True)
        run(here, folder, pending, extent, found)
    except TimeIsUpError:
        for name in pending:
            found.append(Found(name, Verdict.NOT_REACHED, f"{CARD_WITHIN_S:g} s were over"))
            print(f"{found[-1].verdict.value}: {name}: {found[-1].text}", flush=True)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        shutil.rmtree(folder, ignore_errors=True)
    told = report(here, found)
    if options.card:
        told |= {"seconds": round(time.monotonic() - began_s, 1), "connected": choice}
    print(json.dumps(told))
    return int(any(one.verdict is Verdict.FAILED for one in found))


def _time_is_up(*_: object) -> None:
    raise TimeIsUpError


def run(here: Here, folder: Path, pending: dict[str, Check], extent: Extent, found: list[Found]) -> None:
    """Run each check in turn, print each result and add it to ``found``; a check that is done is pending no longer."""
    began_s = time.monotonic()
    for name in list(pending):
        check = _one_rank_only if name in SHARING and "sharing" not in here.has else pending[name]
        for one in check(here, folder / name, extent):
            found.append(one)
            at_s = time.monotonic() - began_s
            print(f"[{at_s:6.1f} s] {one.verdict.value}: {one.check}: {one.text} ({here.said()})", flush=True)
        del pending[name]


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
        "nccl": here.nccl,
        "backend": devices.backend_of(here.device),
        **counts,
        "checks": [
            {"check": one.check, "verdict": one.verdict.value, "text": one.text, "figures": one.figures}
            for one in found
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
