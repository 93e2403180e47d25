"""Key-value calls over real sockets: many threads, scheduler restarts, waits that end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from samebits.core.agent.agent_events import KeyAsk
from samebits.core.agent.key_calls import MAX_OPEN_CALLS
from samebits.core.messages import KeyAnswer, KeyOp, KeyOutcome
from samebits.core.ready import JobEnded
from samebits.errors import GenerationEndedError, KeyValueError, KeyValueTimeoutError, SchedulerLeftError
from samebits.service.agent import Agent
from tests.service.house import PATIENCE_S, House, remove_folder

ADD = KeyAsk(KeyOp.ADD, b"n", amount=1, is_durable=True)
GET = KeyAsk(KeyOp.GET, b"n")
WAIT = KeyAsk(KeyOp.WAIT, b"w")


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path, workers=2)
    yield house
    house.close()


def started_again(house: House, served: Future[JobEnded]) -> Future[JobEnded]:
    assert house.service is not None
    house.service.abandon()
    with pytest.raises(SchedulerLeftError):
        served.result(PATIENCE_S)
    return house.scheduler()


def number(answer: KeyAnswer) -> int:
    return int(msgspec.msgpack.decode(answer.value))


def test_each_sum_is_returned_once_across_scheduler_restarts(house: House) -> None:
    served = house.scheduler()
    agents = house.seated("0", "1")

    def count(agent: Agent) -> list[int]:
        return [number(agent.call_keys(ADD, PATIENCE_S)) for _ in range(40)]

    with ThreadPoolExecutor(4) as pool:
        counting = [pool.submit(count, agent) for agent in (*agents, *agents)]
        for _ in range(3):
            served = started_again(house, served)
        sums = [one for counted in counting for one in counted.result(PATIENCE_S)]
    assert sorted(sums) == list(range(1, 161))
    assert number(agents[0].call_keys(GET, PATIENCE_S)) == 160


@pytest.mark.parametrize("is_first", [True, False])
def test_durable_keys_are_rewritten_if_the_recovery_path_was_removed(house: House, is_first: bool) -> None:
    served = house.scheduler()
    agent, _ = house.seated("0", "1")
    sums = [] if is_first else [number(agent.call_keys(ADD, PATIENCE_S))]
    for _ in range(2):
        remove_folder(house.path / "recovery")
        sums.append(number(agent.call_keys(ADD, PATIENCE_S)))
    started_again(house, served)
    sums.append(number(agent.call_keys(ADD, PATIENCE_S)))
    assert sums == list(range(1, len(sums) + 1))


def test_wait_ends_when_the_key_is_written(house: House) -> None:
    served = house.scheduler()
    writer, reader = house.seated("0", "1")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(reader.call_keys, WAIT, PATIENCE_S, is_wait=True)
        started_again(house, served)
        writer.call_keys(KeyAsk(KeyOp.PUT, b"w", b"\x07"), PATIENCE_S)
        assert number(waiting.result(PATIENCE_S)) == 7


def test_wait_ends_at_its_timeout_and_with_its_generation(house: House) -> None:
    house.scheduler()
    agents = house.seated("0", "1")
    with pytest.raises(KeyValueTimeoutError, match=r"no answer for key 'w' within 0.05 s. Fix: "):
        agents[0].call_keys(WAIT, 0.05, is_wait=True)
    places = house.generation(*agents)
    house.mapped(agents, places)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(agents[0].call_keys, WAIT, PATIENCE_S, is_wait=True)
        agents[1].leave(on_purpose=False, text="the test ends it")
        with pytest.raises(GenerationEndedError):
            waiting.result(PATIENCE_S)
    assert agents[0].call_keys(GET, PATIENCE_S).outcome is KeyOutcome.ABSENT, "other calls are still answered"


def test_number_of_pending_calls_per_process_is_bounded(house: House) -> None:
    house.scheduler()
    (agent, _) = house.seated("0", "1")
    with ThreadPoolExecutor(MAX_OPEN_CALLS) as pool:
        waiting = [pool.submit(agent.call_keys, WAIT, PATIENCE_S) for _ in range(MAX_OPEN_CALLS)]
        patience = threading.Event()
        while len(agent._key_answers) < MAX_OPEN_CALLS:
            assert not patience.wait(0.01)
        with pytest.raises(KeyValueError, match=r"already has 64 unfinished calls, the maximum. Fix: "):
            agent.call_keys(GET, PATIENCE_S)
        house.agents[1].call_keys(KeyAsk(KeyOp.PUT, b"w", b"\x01"), PATIENCE_S)
        assert {one.result(PATIENCE_S).version for one in waiting} == {waiting[0].result().version}


def test_departed_worker_gets_an_error(house: House) -> None:
    house.scheduler()
    (agent, _) = house.seated("0", "1")
    agent.leave(on_purpose=True, text="done")
    agent._thread.join(PATIENCE_S)
    with pytest.raises(KeyValueError, match=r"has left its job, or was forked from a worker. Fix: "):
        agent.call_keys(GET, PATIENCE_S)
