"""A worker without torch that starts fast: it registers, joins generations, counts steps and leaves.

Its state is a step counter. Nothing is computed; "restoring" sets the number that the core chose.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from samebits import config
from samebits.core.messages import Holdings
from samebits.core.point import Point
from samebits.core.reports import FINAL, Digest, Figure
from samebits.errors import GenerationEndedError, HostsUpdatedInterrupt, JobStoppedError, SameBitsError
from samebits.service import log
from samebits.service.agent import Agent
from samebits.store.checkpoint import rank_directory
from samebits.store.owner import claim_folder


class LeavingError(Exception):
    """Raised in a worker that was asked to leave and has no step to finish."""


class Departure:
    """The reaction to SIGTERM: leave between two steps, or while waiting."""

    def __init__(self) -> None:
        self._is_asked = self.waits = False

    def take(self, *_: object) -> None:
        self._is_asked = True
        if self.waits:
            self.obey()

    def obey(self) -> None:
        if self._is_asked:
            self._is_asked = False
            raise LeavingError


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--until", type=Path, help="train until this file is there")
    parser.add_argument("--step-s", type=float, default=0.01)
    parser.add_argument("--fail-at", type=int, default=-1)
    parser.add_argument("--fail-before", action="store_true")
    parser.add_argument("--say", default="")
    parser.add_argument("--seated", action="store_true", help="say that it has a seat, as samebits.init() does")
    parser.add_argument("--reports", type=Path, help="a file with a number, which is reported as the queue")
    parser.add_argument("--linger-while", type=Path, help="does not end while this file is there")
    parser.add_argument("--not-while", type=Path, help="does not start while this file is there")
    parser.add_argument("--only-node", default="", help="the only node that --not-while is meant for")
    options = parser.parse_args()
    if options.fail_before:
        raise RuntimeError("this script cannot even start")
    settings, _ = config.read()
    waits = options.not_while is not None and options.only_node in ("", settings.node_id)
    while waits and options.not_while.exists():
        threading.Event().wait(0.02)  # as if it imported something large
    log.set_up(f"worker {settings.node_id}")
    agent = Agent(settings, settings.job_name, "cpu")
    departure = Departure()
    try:
        admitted = agent.register()
        if options.seated:
            log.say(f"seated: slot {admitted.slot} of {admitted.world_size}, start {admitted.incarnation}")
        if options.say:
            print(f"says {options.say!r}", flush=True)

        def claim(slot: int) -> None:
            claim_folder(rank_directory(settings.checkpoint_path, slot), admitted.job, settings.job_name)

        signal.signal(signal.SIGTERM, departure.take)
        final = train(agent, options, claim, departure)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    except LeavingError:
        agent.leave(on_purpose=True, text="it was asked to")
        return 143
    except SameBitsError as error:
        print(f"samebits: {error}", file=sys.stderr, flush=True)
        agent.leave(on_purpose=isinstance(error, JobStoppedError), text=str(error))
        return error.exit_code
    except ValueError as error:
        agent.speak_last(f"ValueError: {error}")
        agent.leave(on_purpose=False, text=f"ValueError: {error}")
        raise
    print(f"final step={final.step}", flush=True)
    while options.linger_while is not None and options.linger_while.exists():
        threading.Event().wait(0.02)  # as if it wrote its results
    agent.leave(on_purpose=True, text="its program ended with status 0")
    return 0


def train(agent: Agent, options: argparse.Namespace, claim: Callable[[int], object], departure: Departure) -> Point:
    points: list[Point] = []
    pace = threading.Event()
    while True:
        departure.waits = True
        departure.obey()
        place = agent.enter(Holdings(tuple(points), False, ()))
        departure.waits = False
        if isinstance(place, Point):
            return place
        try:
            claim(place.slot)
            agent.publish(place.generation, b"here")
            agent.address_map(place.generation)
            agent.step = place.restore.step if place.restore else 0
            agent.trains(place.generation)
            while not is_done(agent.step, options):
                pace.wait(options.step_s)
                agent.check()
                departure.obey()
                if agent.step == options.fail_at:
                    fail()
                if options.reports is not None:
                    agent.figures = (Figure("queue", float(options.reports.read_text())),)
                agent.step += 1
                points = [Point(agent.step, place.generation)]
                print(f"epoch 0 step {agent.step} loss {1 / agent.step:.4f}", flush=True)
            departure.waits = True
            final = Digest(Point(agent.step, place.generation), FINAL, b"equal")
            return agent.complete(place.generation, agent.step, [final])
        except (GenerationEndedError, HostsUpdatedInterrupt) as ended:
            if options.fail_at >= 0:  # all workers have this error, whichever is first
                fail()
            print(f"left generation {place.generation}: {ended}", flush=True)


def fail() -> NoReturn:
    raise ValueError("a loss that is no number") from None


def is_done(step: int, options: argparse.Namespace) -> bool:
    return options.until.exists() if options.until is not None else step >= options.steps


if __name__ == "__main__":
    sys.exit(main())
