"""The loop shared by campaigns that kill processes of whole jobs: draw a kill, run it, print its verdict, count.

A campaign's last line is one JSON object, and its status is 1 if any job went wrong. The folder of such a job is kept.
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tests.system.processes import WarmStarter

__all__ = ["Campaign", "Verdict", "parser_of", "run"]

Kill = TypeVar("Kill")


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a disturbed job ended.

    Attributes:
        outcome: a wrong one is in capitals: ``OTHER BITS``, ``SILENT``, ``ENDLESS``, ``NO SENTENCE``, ``REDONE`` (too
            many steps), ``SURVIVOR`` (a process that was not killed was replaced).
        detail: the sentence of a refusal, what is wrong, or a number that is worth reporting.
    """

    outcome: str
    detail: str = ""

    @property
    def is_wrong(self) -> bool:
        return self.outcome.isupper()


class Campaign(Protocol[Kill]):
    """The methods that the loop of kills calls."""

    def draws(self, chance: random.Random) -> Iterator[Kill]:
        """Yield kills endlessly; equal seeds yield equal kills."""

    def run(self, kill: Kill) -> Verdict:
        """Run one job with this kill."""

    def forget(self) -> None:
        """Remove the folder of the newest job."""


def parser_of(module: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of every campaign."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=1, help="skip the kills before this one of the seed")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no further kill after so many")
    return parser


def run(options: argparse.Namespace, made: Callable[[Path, WarmStarter], Campaign[Any]], starter: WarmStarter) -> int:
    """Run a campaign to its end; return the status of the process.

    Args:
        options: the options that :func:`parser_of`'s parser returned.
        made: returns the campaign, given the folder for its jobs.
        starter: starts the processes; closed at the end.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    folder = Path(tempfile.mkdtemp(prefix="samebits-kills-"))
    outcomes: collections.Counter[str] = collections.Counter()
    wrong = []
    began_s = time.monotonic()
    try:
        campaign = made(folder, starter)
        for number, kill in enumerate(campaign.draws(random.Random(options.seed)), start=1):
            if number < options.first:
                continue
            if outcomes.total() - outcomes["not reached"] >= options.kills:
                break
            if time.monotonic() - began_s > options.seconds:
                break
            verdict = campaign.run(kill)
            outcomes[verdict.outcome] += 1
            since = f"[{time.monotonic() - began_s:6.1f} s] {number}"
            print(f"{since} {kill}: {verdict.outcome} {verdict.detail}", flush=True)
            wrong += [f"{number} {kill}"] if verdict.is_wrong else []
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
