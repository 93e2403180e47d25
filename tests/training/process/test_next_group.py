"""The next generation's group: what it does before the generation is known, and giving it up."""

from __future__ import annotations

import threading

import pytest
import torch

from samebits import config
from samebits.config import Settings
from samebits.core.messages import GenerationStarted, RankPosition, RoundId
from samebits.errors import GenerationEndedError
from samebits.training.process import next_group
from samebits.training.process.next_group import NextGroup, NextGroups, likely_place

WAIT_S = 60.0
CPU = torch.device("cpu")


def settings(**variables: str) -> Settings:
    environment = {"ROLE": "worker", "WORKER_NUM": "2", "ENABLE_RECOVERY": "1", "DEVICE": "cpu", **variables}
    return config.read(environment)[0]


@pytest.mark.parametrize(
    ("node", "slot"),
    [("0", 0), ("1", 1), ("2", None), ("1.3", 1), ("2.1", None), ("x.1", None), ("host-1", None), ("-1", None)],
)
def test_number_below_the_world_size_names_the_slot(node: str, slot: int | None) -> None:
    assert likely_place(settings(NODE_ID=node)) == (None if slot is None else RankPosition(slot, slot, 2))


def connecting_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "samebits-connect"]


def test_group_has_an_address_before_any_answer_and_can_be_given_up() -> None:
    waiting = NextGroup(settings(NODE_ID="0"), CPU, RankPosition(0, 0, 2))
    assert waiting.blob()
    (thread,) = connecting_threads()
    waiting.group.drop()
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_place_that_is_offered_again_keeps_the_address_that_was_sent_for_it() -> None:
    groups = NextGroups(lambda place: NextGroup(settings(NODE_ID="1"), CPU, place))
    sent = []
    for world_size in (4, 3, 4):
        groups.offer(RankPosition(1, 1, world_size))
        assert groups.present is not None
        sent.append(groups.present.blob())
    threads = connecting_threads()
    assert sent[0] == sent[2] != sent[1]
    taken = groups.take()
    assert (taken.place.world_size, taken.blob()) == (4, sent[0])
    assert groups.present is None
    taken.group.drop()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive(), "the group for the other place was dropped"


class _Agent:
    """Answers at once when asked for the map of generation 7: with one rank's part, twice."""

    def __init__(self, blob: bytes) -> None:
        self._blob = blob

    def address_map(self, generation: int) -> list[bytes]:
        assert generation == 7
        return [self._blob]


def test_group_forms_when_the_generation_is_known() -> None:
    alone = NextGroup(settings(NODE_ID="0", WORKER_NUM="1"), CPU, RankPosition(0, 0, 1))
    place = GenerationStarted("job-1", 1, 1, 7, RoundId(1, 1), 0, 1, 0, 1, None, 0, (), "", 0)
    group = alone.begins(place, _Agent(alone.blob()))  # type: ignore[arg-type]
    try:
        assert group.form().world_size == 1
        group.break_("it is over")
        with pytest.raises(GenerationEndedError, match="generation 7 was broken: it is over"):
            group.breaker.check()
    finally:
        group.drop()


def test_foreign_address_is_an_error_and_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(next_group, "address_towards", lambda host, port: "192.0.2.1")  # RFC 5737: belongs to no host
    stuck = NextGroup(settings(NODE_ID="0"), CPU, RankPosition(0, 0, 2))
    with pytest.raises(RuntimeError, match=r"192\.0\.2\.1|bind|assign"):
        stuck.blob()
    stuck.group.drop()


def test_group_is_on_the_models_device_whatever_the_slot() -> None:
    next_group = NextGroup(settings(NODE_ID="8", WORKER_NUM="8"), torch.device("cuda", 0), RankPosition(3, 3, 8))
    try:
        assert next_group.group.device == torch.device("cuda", 0)
        assert next_group.blob(), "its address needs no device"
    finally:
        next_group.group.drop()
