"""Train like ``anomaly_script`` on a node whose node-check measurements the test sets, or which sums wrongly.

The result must not depend on this machine's speed, so the measurements are replaced; their exchange, the judgement and
the consequences are real. ``SICK=slow`` takes ten times as long as the others, ``SICK=slow-once`` only in the first
measurement, ``SICK=wrong`` flips a bit in its contribution to a sum, ``SICK=silent`` never answers in a sum,
``SICK=dies`` and ``SICK=stops`` are killed and stopped on the way to it, ``SICK=waits`` waits until the test releases
it. ``MACHINE`` is the host that the check is given.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist

from samebits.core.watch.node_check import NodeTimings, Sum
from samebits.training.process import node_comparison, preflight

SICK = os.environ.get("SICK", "")
machine = os.environ.get("MACHINE", os.environ.get("NODE_ID", "")).encode()
node_comparison.machine_id = lambda: machine  # type: ignore[assignment]
measured = iter([SICK in ("slow", "slow-once"), *[SICK == "slow"] * 9])
all_reduce, add_up = dist.all_reduce, node_comparison.added_up


def figures(found: Iterable[preflight.CheckResult]) -> NodeTimings:
    """Return measurements as if read from a clock."""
    for _ in found:
        """The real measurement still runs."""
    return NodeTimings(0.5 if next(measured) else 0.05, 0.02, 0.02)


def errs(tensor: torch.Tensor) -> None:
    """Return whether this device errs."""
    tensor.view(torch.int32)[777] ^= 1 << 20
    all_reduce(tensor)


def added_up(device: torch.device, rank: int) -> Sum:
    """Let every sum take the same time."""
    if SICK == "silent":
        time.sleep(2 * node_comparison.PAIR_S)
        raise RuntimeError("the others have given up")
    dist.all_reduce = errs if SICK == "wrong" else all_reduce
    found = add_up(device, rank)
    return Sum(0.01, found.problem)


preflight.figures, node_comparison.added_up = figures, added_up
node_comparison.PAIR_S = 3.0
node_comparison.ROUND_S = float(os.environ.get("ROUND_S", node_comparison.ROUND_S))
if SICK in ("dies", "stops"):
    node_comparison._Meeting.publish = lambda meeting, blob: os.kill(  # type: ignore[method-assign]
        os.getpid(), signal.SIGKILL if SICK == "dies" else signal.SIGSTOP
    )
if SICK == "waits":
    publish = node_comparison._Meeting.publish

    def wait_and_publish(meeting: node_comparison._Meeting, blob: bytes) -> None:
        """Publish once the test allows it."""
        Path("meets").touch()
        while not Path("may-meet").exists():
            time.sleep(0.05)
        publish(meeting, blob)

    node_comparison._Meeting.publish = wait_and_publish  # type: ignore[method-assign]

if __name__ == "__main__":
    from tests.system import anomaly_script  # noqa: F401 - it trains
