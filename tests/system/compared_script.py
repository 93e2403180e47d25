"""Trains as ``anomaly_script`` does, on a node whose figures in the pre-flight the test chooses, or that adds up wrong.

How fast this machine is at the moment shall not decide: what is exchanged, who is named and what follows is what is
tested. ``SICK=slow`` needs ten times as long as all others, ``SICK=slow-once`` only the first time it measures,
``SICK=wrong`` flips a bit in what it gives to a sum, ``SICK=silent`` never answers in a sum, ``SICK=dies`` and
``SICK=stops`` are killed and stopped on their way to it, ``SICK=waits`` until the test lets it go. ``MACHINE`` is where
it runs, as far as the check is told.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist

from samebits.core.watch.node_check import Figures, Sum
from samebits.training.process import node_check, preflight

SICK = os.environ.get("SICK", "")
machine = os.environ.get("MACHINE", os.environ.get("NODE_ID", "")).encode()
node_check.machine_id = lambda: machine  # type: ignore[assignment]
measured = iter([SICK in ("slow", "slow-once"), *[SICK == "slow"] * 9])
all_reduce, add_up = dist.all_reduce, node_check.added_up


def figures(found: Iterable[preflight.Look]) -> Figures:
    """As if a clock had said so."""
    for _ in found:
        """It is measured all the same."""
    return Figures(0.5 if next(measured) else 0.05, 0.02, 0.02)


def errs(tensor: torch.Tensor) -> None:
    """A device that errs."""
    tensor.view(torch.int32)[777] ^= 1 << 20
    all_reduce(tensor)


def added_up(device: torch.device, rank: int) -> Sum:
    """Every sum takes as long."""
    if SICK == "silent":
        time.sleep(2 * node_check.PAIR_S)
        raise RuntimeError("the others have given up")
    dist.all_reduce = errs if SICK == "wrong" else all_reduce
    found = add_up(device, rank)
    return Sum(0.01, found.problem)


preflight.figures, node_check.added_up = figures, added_up
node_check.PAIR_S = 3.0
node_check.WAIT_S = float(os.environ.get("WAIT_S", node_check.WAIT_S))
if SICK in ("dies", "stops"):
    node_check._Meeting.publish = lambda meeting, blob: os.kill(  # type: ignore[method-assign]
        os.getpid(), signal.SIGKILL if SICK == "dies" else signal.SIGSTOP
    )
if SICK == "waits":
    publish = node_check._Meeting.publish

    def wait_and_publish(meeting: node_check._Meeting, blob: bytes) -> None:
        """Once the test says so."""
        Path("meets").touch()
        while not Path("may-meet").exists():
            time.sleep(0.05)
        publish(meeting, blob)

    node_check._Meeting.publish = wait_and_publish  # type: ignore[method-assign]

if __name__ == "__main__":
    from tests.system import anomaly_script  # noqa: F401 - it trains
