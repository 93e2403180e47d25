"""Processes that call the key-value store, their answers, and the keys' journal on the scheduler's disk.

Every key is durable, so an answer that a process has received outlives schedulers. The journal is a list of records;
an unfinished append leaves any prefix of them. The random numbers are separate, and a world without key calls has none
of this.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from samebits.core.agent import agent_events
from samebits.core.agent.agent_events import Answered, GaveUp, KeyAsk
from samebits.core.keys.key_store import SCHEMA, KeyRecord
from samebits.core.messages import KeyAnswer, KeyOp
from samebits.core.scheduler import SchedulerCore
from samebits.core.values import replace
from tests.core.linearizability import Called

if TYPE_CHECKING:
    from tests.simulation.worker import Worker
    from tests.simulation.world import World

KEYS = (b"a", b"b")
MOST_CALLS = 14
"""Limit on one job's calls to one key, since checking linearizability is a search."""
P_COMPACTS, P_GIVES_UP, P_DIES = 0.1, 0.1, 0.02


class Keys:
    """The keys of one run.

    Attributes:
        history: the current job's history, by key.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._chance = world.random_of("calls")
        self._journals: dict[str, list[bytes]] = defaultdict(list)  # by job
        self._under_way: dict[tuple[str, int], Called] = {}  # by session and ticket
        self._given_up: set[tuple[str, int]] = set()
        self._said: set[KeyAnswer] = set()  # by schedulers of the current job, whichever it was
        self._moment = self._tickets = 0
        self.history: dict[bytes, list[Called]] = defaultdict(list)
        world.when_said[KeyAnswer].append(self._answers)

    # ---- the journal

    def load(self, core: SchedulerCore) -> None:
        """A scheduler reads the keys of its job at its start."""
        core.load_keys([SCHEMA.unpack(record) for record in self._journals[core.state.job]])

    def append(self, job: str, records: Sequence[KeyRecord], core: SchedulerCore) -> bool:
        """Make these durable; return False if the process dies in it."""
        chance, packed = self._chance, [SCHEMA.pack(record) for record in records]
        if chance.random() < P_DIES and not self._world.is_calm:
            self._journals[job] += packed[: chance.randint(0, len(packed))]
            return False
        self._journals[job] += packed
        if chance.random() < P_COMPACTS:
            self._journals[job] = [SCHEMA.pack(record) for record in core.keys.snapshot()]
        return True

    def append_in_part(self, job: str, records: Sequence[KeyRecord]) -> None:
        """The append did not return."""
        packed = [SCHEMA.pack(record) for record in records]
        self._journals[job] += packed[: self._chance.randint(0, len(packed))]

    def wipe(self) -> None:
        """The folder is deleted."""
        self._journals.clear()
        self.begin_job()

    def begin_job(self) -> None:
        """No key exists; unanswered calls may be repeated to the next keeper of the keys."""
        self._said.clear()
        for key in KEYS:
            self.history[key] = [called for called in self._under_way.values() if called.ask.key == key]

    # ---- callers

    def begin(self, worker: Worker) -> None:
        """Let the process make occasional calls."""
        if self._world.mix.calls_every_s:
            self._later(worker)

    def _later(self, worker: Worker) -> None:
        every_s = self._world.mix.calls_every_s
        self._world.after(every_s * self._chance.uniform(0.2, 1.8), self._call, worker)

    def _call(self, worker: Worker) -> None:
        if not worker.is_alive:
            return
        self._later(worker)
        if not worker.agent.seated or worker.is_paused or worker.is_of_another_job():
            return
        ask = self._drawn()
        if len(self.history[ask.key]) >= MOST_CALLS:
            return
        self._moment, self._tickets = self._moment + 1, self._tickets + 1
        called = Called(ask, self._moment)
        self.history[ask.key].append(called)
        self._under_way[worker.session, self._tickets] = called
        ticket = self._tickets
        worker.says(agent_events.Called(ticket, ask))
        if self._chance.random() < P_GIVES_UP:
            self._world.after(self._chance.uniform(0.1, 5.0), self._give_up, worker, ticket)

    def _give_up(self, worker: Worker, ticket: int) -> None:
        if (worker.session, ticket) in self._under_way and worker.is_alive:
            self._given_up.add((worker.session, ticket))
            worker.says(GaveUp(ticket))

    def _answers(self, _session: str, answer: KeyAnswer) -> None:
        self._said.add(replace(answer, term=0))

    def answered(self, worker: Worker, notice: Answered) -> None:
        """The process gets an answer. A late one from the previous job says nothing about this job's keys."""
        called = self._under_way.pop((worker.session, notice.ticket), None)
        if called is None or replace(notice.answer, term=0) not in self._said:
            return
        if (worker.session, notice.ticket) not in self._given_up:
            self._moment += 1
            called.ended, called.answer = self._moment, notice.answer
            self._world.count("key call answered")

    def _drawn(self) -> KeyAsk:
        chance, key = self._chance, self._chance.choice(KEYS)
        value = msgspec.msgpack.encode(1000 + self._tickets)
        seen = [one.answer.version for one in self.history[key] if one.answer is not None]
        version = chance.choice([0, *seen[-3:]])
        match chance.choice(list(KeyOp)):
            case KeyOp.PUT:
                return KeyAsk(KeyOp.PUT, key, value, is_durable=True)
            case KeyOp.DELETE:
                return KeyAsk(KeyOp.DELETE, key, version=chance.choice((0, version)))
            case KeyOp.ADD:
                return KeyAsk(KeyOp.ADD, key, amount=chance.randint(1, 3), is_durable=True)
            case KeyOp.COMPARE_AND_SET:
                return KeyAsk(KeyOp.COMPARE_AND_SET, key, value, version, is_durable=True)
            case KeyOp.WAIT:
                return KeyAsk(KeyOp.WAIT, key, version=version)
        return KeyAsk(KeyOp.GET, key)
