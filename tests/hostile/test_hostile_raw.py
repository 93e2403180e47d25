"""Other protocols at the scheduler's port: its job is unaffected, and one line reports them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from samebits.core import messages
from samebits.core.messages import StatusQuery
from samebits.net.server import PEER_TURNS, Arrived, Garbled
from samebits.service.scheduling.unknown_peers import Offence
from tests.hostile.attackers import dealers
from tests.hostile.raw import OPENINGS, drawn, say
from tests.hostile.test_hostile_service import SECRET, Attacked
from tests.net.ends import Ends, until

ASKED = messages.SCHEMA.pack(StatusQuery(follow=False))
SEEDS = 150
TIMES = 3  # a browser's request once ended the scheduler within three tries


@pytest.fixture(params=[{}, {"CLUSTER_SECRET": SECRET}], ids=["open", "secret"])
def attacked(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Attacked]:
    attacked = Attacked(tmp_path, **request.param)
    yield attacked
    attacked.house.close()


def test_other_protocols_are_dropped_and_the_job_continues(attacked: Attacked) -> None:
    for words in OPENINGS.values():
        for _ in range(TIMES):
            say(attacked.port, words)
        say(attacked.port, words, half=True)
        assert not attacked.served.done(), attacked.served.result()
    for seed in range(SEEDS):
        say(attacked.port, drawn(seed))
        assert not attacked.served.done(), (seed, attacked.served.result())
    attacked.finish()


def test_five_bytes_are_counted_and_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    attacked = Attacked(tmp_path)
    try:
        for _ in range(20):
            say(attacked.port, OPENINGS["five bytes"])
        attacked.wait(lambda: attacked.count(Offence.GARBLED) >= 20)
        attacked.wait(lambda: any("does not speak ZMTP 3" in record.message for record in caplog.records))
        assert sum("refused" in record.message for record in caplog.records) == 1
        attacked.finish()
    finally:
        attacked.house.close()


def test_many_old_zmtp_peers_do_not_end_a_drain_early() -> None:
    """Messages of old peers name no connection; counted as one peer's, they would end a drain after PEER_TURNS."""
    ends = Ends()
    try:
        with dealers(ends.port, [b"honest"]) as (honest,):
            honest.send(ASKED)
            until(ends.heard, lambda item: isinstance(item, Arrived))
            count = PEER_TURNS // 2
            for _ in range(count):
                say(ends.port, b"\x01\x00" + b"\x02\x00B" * 3)
            (first, *_) = drains = [list(ends.server.drain())]
            assert sum(isinstance(item, Garbled) for item in first) == 3 * count > PEER_TURNS
            honest.send(ASKED)
            while Arrived("honest", StatusQuery(follow=False)) not in drains[-1]:
                assert len(drains) < 100, "never heard"
                drains.append(ends.heard())
        assert ends.server._descriptor_of.keys() <= {"honest"}
    finally:
        ends.close()
