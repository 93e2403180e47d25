"""The address on which rank 0 hosts the store of a plain script's group."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from samebits import config
from samebits.training.process import next_group
from tests.hostile.attackers import is_let_in, listening_ports

SOON = timedelta(seconds=60)


@pytest.fixture
def hosted() -> Iterator[tuple[str, int]]:
    before = set(listening_ports(os.getpid()))
    settings, _ = config.read({"ROLE": "worker", "WORKER_NUM": "2", "NODE_ID": "0", "SCHED_HOST": "127.0.0.1"})
    host, _, port = next_group._host_store(settings, 2).rpartition(":")
    assert set(listening_ports(os.getpid())) - before == {(host, int(port))}
    yield host, int(port)
    next_group._hosted.pop()


def test_store_listens_only_on_the_address_towards_the_scheduler(hosted: tuple[str, int]) -> None:
    host, port = hosted
    assert host == "127.0.0.1"
    assert not is_let_in(("127.0.0.2", port)), "it listens on every address"
    one, two = (dist.TCPStore(host, port, 2, False, SOON, wait_for_workers=False) for _ in range(2))
    one.set("key", "value")
    assert two.get("key") == b"value"
