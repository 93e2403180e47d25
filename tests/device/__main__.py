"""Check this machine's device: ``python -m tests.device [--card] [--quick] [--simulated] [--stops] [--only CHECK …]``.

Looks for a GPU, then an NPU. If there is neither, or with ``--simulated``, everything runs on a simulated device
(``tests.device.backend``), and checks that need a card report "not on this device". It needs no network. It prints each
result at once, with card, driver and torch, then one JSON object; the status is 1 if anything failed.

``--card`` is for the first minutes with one card: the most telling checks first, and never longer than ``--within``
seconds. A check that takes more than a third of them has failed, and the next one runs. Checks that were not reached by
the end are counted apart. The simulated device then refuses two ranks on one device, as NCCL does.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from tests.device.checks import CARD, CARD_CHECKS, CHECKS, QUICK, SHARING, WHOLE, Check, Extent, Found, Verdict
from tests.device.here import Here, connected, look

CARD_WITHIN_S = 235.0
"""240 s, less what ending the job that runs then may take."""
PART_SHARE = 1 / 3
"""The longest share of all seconds for one check, so that a check that hangs leaves time for the others."""
PAIR_SHARE = PART_SHARE / 2
"""Likewise, for one of two attempts to connect two ranks."""
SHOWN_LINES = 6
"""How many last lines of each log are shown if a check exceeds its time."""


class TimeIsUpError(BaseException):
    """Raised by the alarm in the check that runs; no check catches it, and each ends its processes."""


class StoppedError(BaseException):
    """Raised by SIGTERM; the report is printed nevertheless."""


@dataclass(slots=True)
class Clock:
    """The time that is left. The alarm interrupts whatever runs when it is over.

    Attributes:
        within_s: seconds for everything; infinite without ``--card``.
    """

    within_s: float
    began_s: float = field(default_factory=time.monotonic)

    def passed_s(self) -> float:
        return time.monotonic() - self.began_s

    def left_s(self) -> float:
        return self.within_s - self.passed_s()

    @contextmanager
    def alarm(self) -> Iterator[float]:
        """Raise TimeIsUpError in the body after its share of the time; give the share's seconds."""
        part_s = min(self.left_s(), self.within_s * PART_SHARE)
        if part_s <= 0:
            raise TimeIsUpError
        if part_s != float("inf"):
            signal.setitimer(signal.ITIMER_REAL, part_s)
        try:
            yield part_s
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


def main() -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.device", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--card", action="store_true", help="the most telling checks, for the first minutes with a card"
    )
    parser.add_argument("--within", type=float, default=CARD_WITHIN_S, metavar="SECONDS", help="for all of --card")
    parser.add_argument("--quick", action="store_true", help="fewer cycles, a smaller state")
    parser.add_argument("--simulated", action="store_true", help="not on the card that is here")
    parser.add_argument("--stops", action="store_true", help="the simulated device is stopped as Ascend's is")
    parser.add_argument("--only", nargs="+", choices=[*CHECKS, *CARD_CHECKS], help="default: all")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, _stopped)
    signal.signal(signal.SIGALRM, _time_is_up)
    folder = Path(tempfile.mkdtemp(prefix="samebits-device-"))
    checks = CARD_CHECKS if options.card else CHECKS
    pending = {name: (CHECKS | CARD_CHECKS)[name] for name in options.only or checks}
    extent = CARD if options.card else QUICK if options.quick else WHOLE
    outcome = Outcome()
    status = 0
    try:
        outcome.here = look(
            folder,
            simulated=options.simulated or options.stops,
            stops=options.stops,
            refuses_two_ranks=options.card and not options.stops,
        )
        print(f"on {outcome.here.said()}", flush=True)
        clock = Clock(options.within if options.card else float("inf"))
        if options.card:
            with clock.alarm():
                outcome.here, outcome.connected = connected(outcome.here, folder, clock.within_s * PAIR_SHARE)
            print(f"connected: {outcome.connected}", flush=True)
        run(outcome, folder, pending, extent, clock)
    except (StoppedError, KeyboardInterrupt):
        outcome.not_reached(pending, "the command was stopped")
        status = 128 + signal.SIGTERM
    except TimeIsUpError:
        outcome.not_reached(pending, f"{options.within:g} s were over")
    except Exception as error:  # whatever the card does, what was found until then is reported
        traceback.print_exc()
        outcome.add(Found("the command", Verdict.FAILED, f"{type(error).__name__}: {error}"))
        outcome.not_reached(pending, "the command failed")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(report(outcome)))
    return status or int(any(one.verdict is Verdict.FAILED for one in outcome.found))


def _time_is_up(_number: int, _frame: FrameType | None) -> None:
    raise TimeIsUpError


def _stopped(_number: int, _frame: FrameType | None) -> None:
    raise StoppedError


@dataclass(slots=True)
class Outcome:
    """The result of a run of checks, as far as it is known; printed at the end.

    Attributes:
        here: the device; None until it was found.
        connected: how two ranks on it are connected; empty without ``--card``.
        found: the results.
        spent: by check, its seconds and the CPU seconds of its processes.
    """

    here: Here | None = None
    connected: str = ""
    found: list[Found] = field(default_factory=list)
    spent: dict[str, dict[str, float]] = field(default_factory=dict)
    began_s: float = field(default_factory=time.monotonic)

    def add(self, one: Found) -> None:
        """Print a result and keep it."""
        said = "no device" if self.here is None else self.here.said()
        at_s = time.monotonic() - self.began_s
        over = f"over {one.backend}, " if one.backend else ""
        print(f"[{at_s:6.1f} s] {one.verdict.value}: {one.check}: {one.text} ({over}{said})", flush=True)
        self.found.append(one)

    def not_reached(self, pending: dict[str, Check], why: str) -> None:
        for name in pending:
            self.add(Found(name, Verdict.NOT_REACHED, why))


def run(outcome: Outcome, folder: Path, pending: dict[str, Check], extent: Extent, clock: Clock) -> None:
    """Run each check in turn and add its results; a check that is done is pending no longer."""
    here = outcome.here
    assert here is not None, "the device is known before its checks run"
    for name in list(pending):
        check = _one_rank_only if name in SHARING and "sharing" not in here.has else pending[name]
        before_s, cpu_before_s, place = clock.passed_s(), _children_cpu_s(), folder / name
        if clock.left_s() <= 0:
            raise TimeIsUpError
        try:
            with clock.alarm() as part_s:
                for one in check(here, place, extent):
                    outcome.add(one)
        except TimeIsUpError:
            if clock.left_s() <= 0:
                raise
            outcome.add(Found(name, Verdict.FAILED, f"not done within {part_s:.0f} s\n{_tails(place)}"))
        except Exception as error:  # the other checks must still run
            where = traceback.extract_tb(error.__traceback__)[-1]
            said = f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
            outcome.add(Found(name, Verdict.FAILED, f"{said}\n{_tails(place)}"))
        del pending[name]
        cpu_s, took_s = _children_cpu_s() - cpu_before_s, clock.passed_s() - before_s
        outcome.spent[name] = {"seconds": round(took_s, 1), "cpu_seconds": round(cpu_s, 1)}


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _tails(folder: Path) -> str:
    """Return the last lines of each log of a check."""
    logs = sorted(folder.rglob("*.log"))
    return "\n".join(
        "\n".join([f"--- {log.name}", *log.read_text(errors="replace").splitlines()[-SHOWN_LINES:]]) for log in logs
    )


def _one_rank_only(here: Here, folder: Path, extent: Extent) -> Iterator[Found]:
    """Return why the device accepts only one rank while no other backend accepts its tensors."""
    yield Found(folder.name, Verdict.NOT_HERE, f"{here.kind} takes one rank a device")


def report(outcome: Outcome) -> dict[str, Any]:
    """Return the JSON object."""
    here, found = outcome.here, outcome.found
    counts = {verdict.name.lower(): sum(one.verdict is verdict for one in found) for verdict in Verdict}
    device = {
        "device": "none" if here is None else here.kind,
        "card": "" if here is None else here.card,
        "driver": "" if here is None else here.driver,
        "torch": "" if here is None else here.torch_version,
        "nccl": "" if here is None else here.nccl,
    }
    return {
        **device,
        **counts,
        "checks": [
            {
                "check": one.check,
                "verdict": one.verdict.value,
                "backend": one.backend,
                "text": one.text,
                "figures": one.figures,
            }
            for one in found
        ],
        "seconds": round(time.monotonic() - outcome.began_s, 1),
        "spent": outcome.spent,
        "connected": outcome.connected,
    }


if __name__ == "__main__":
    sys.exit(main())
