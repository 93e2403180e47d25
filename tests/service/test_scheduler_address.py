"""A scheduler's host name without an address is waited for; one that lost its address keeps the last."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from samebits.config import Settings, read
from samebits.errors import SchedulerUnreachableError
from samebits.service import scheduler_address
from samebits.service.scheduler_address import address_towards, addresses_of, wait_for_name

PORT = 8118


class Names:
    """A name service with prepared answers, the last of which repeats."""

    def __init__(self, *answers: str | None) -> None:
        self.answers = list(answers)
        self.asked = 0

    def __call__(self, host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        self.asked += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer is None:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", (answer, port))]


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    scheduler_address._last_known.cache_clear()
    monkeypatch.setattr(scheduler_address, "_RETRY_S", 0.001)
    yield
    scheduler_address._last_known.cache_clear()


def settings_of(topo_timeout_s: str = "60") -> Settings:
    return read(
        {"ROLE": "worker", "WORKER_NUM": "1", "SCHED_HOST": "sched", "NODE_ID": "0"}
        | {"TOPO_TIMEOUT": topo_timeout_s, "NODE_TIMEOUT": "0.01", "HEARTBEAT_INTERVAL": "0.001"}
    )[0]


def test_name_without_an_address_is_waited_for_and_reported_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    names = Names(None, None, None, "127.0.0.1")
    monkeypatch.setattr(socket, "getaddrinfo", names)
    wait_for_name(settings_of())
    assert names.asked == 4
    assert caplog.text.count("SCHED_HOST=sched has no address") == 1
    assert address_towards("sched", PORT) == "127.0.0.1"


def test_name_that_never_gets_an_address_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", Names(None))
    with pytest.raises(SchedulerUnreachableError, match=r"SCHED_HOST=sched has no address .*Fix: export SCHED_HOST"):
        wait_for_name(settings_of("0.02"))


def test_name_that_lost_its_address_means_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Like a Service whose pod is away: a worker that forms a new generation meanwhile must not die."""
    names = Names("127.0.0.1", "127.0.0.2", None)
    monkeypatch.setattr(socket, "getaddrinfo", names)
    assert addresses_of("sched", PORT) == {("127.0.0.1", PORT)}
    assert addresses_of("sched", PORT) == {("127.0.0.2", PORT)}
    assert addresses_of("sched", PORT) == {("127.0.0.2", PORT)}
    assert address_towards("sched", PORT) == "127.0.0.1"  # from where loopback is reached


def test_name_that_never_had_an_address_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", Names(None))
    with pytest.raises(socket.gaierror):
        address_towards("sched", PORT)
