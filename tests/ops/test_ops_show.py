"""``samebits status``: what its head says besides the job's state."""

from __future__ import annotations

from runtime import config
from runtime.ops.show import table
from tests.ops.views import view

FULL = "host node-a: the disk of /data/ckpt is 93 % full (limit 90 %, HEALTH_DISK_LIMIT)"


def test_a_host_that_is_not_well_is_named_above_the_workers() -> None:
    settings, _ = config.read({"WORKER_NUM": "3", "ROLE": "worker", "NODE_ID": "0"})
    lines = table(view(ailments=(FULL,)), settings).splitlines()
    assert FULL in lines[: lines.index(next(line for line in lines if line.startswith("slot")))]
    assert FULL not in table(view(), settings)
