"""The key-value store under faults: callers, a lossy network, a scheduler that is killed, and its journal.

Everything is drawn from one seed and nothing waits for a clock, so a thousand histories take seconds. The scheduler
follows the shell's contract: it takes pending messages, makes all or none of the records durable, and only then
answers. It may be killed between any two of these steps.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from samebits.core.agent.agent_events import KeyAsk
from samebits.core.agent.key_calls import KeyCalls
from samebits.core.keys.key_store import SCHEMA, KeyRecord, KeyStore, replay
from samebits.core.messages import Credential, KeyAnswer, KeyCall, KeyOp
from tests.core.linearizability import Called

KEYS = (b"a", b"b")
CALLS = 26
CALLERS = 3
AT_A_TIME = 3
PATIENCE_STEPS = 4000


@dataclass(frozen=True, slots=True)
class Build:
    """The code under test, with what a mutant changes."""

    store: Callable[[int], KeyStore] = KeyStore
    calls: Callable[[], KeyCalls] = KeyCalls
    reads: Callable[[list[KeyRecord], int], KeyStore] = replay
    speaks_first: bool = False
    takes_old_answers: bool = False


@dataclass(slots=True)
class Caller:
    """One process that calls the store."""

    session: str
    calls: KeyCalls
    term: int  # of the scheduler that admitted it
    under_way: dict[int, Called] = field(default_factory=dict)  # by ticket

    @property
    def sender(self) -> Credential:
        return Credential("job", self.session, self.session, 1)


class Unanswered(AssertionError):
    """A call is still unanswered after the faults have ended."""


class World:
    """One run.

    Args:
        seed: determines every random choice.
        is_durable: the scheduler is killed as well; without it, keys may be durable or not.
    """

    def __init__(self, seed: int, *, is_durable: bool, build: Build | None = None) -> None:
        self.draw = random.Random(seed)
        self.build = build or Build()
        self.is_durable = is_durable
        self.now = 0.0
        self.term = 1
        self.journal: list[bytes] = []
        self.store = self.build.store(self.term)
        self.callers: list[Caller] = []
        self.to_scheduler: list[KeyCall] = []
        self.to_callers: list[KeyAnswer] = []
        self.history: dict[bytes, list[Called]] = defaultdict(list)
        self.moment = 0
        self.tickets = 0
        self.values = 1000
        self.kills = self.lost = self.repeated = 0
        for _ in range(CALLERS):
            self.let_in()

    def run(self) -> dict[bytes, list[Called]]:
        """Return the history of each key. Raise :class:`Unanswered` if a call never returns."""
        faults = self.draw.choice((0.02, 0.08, 0.2))
        while sum(map(len, self.history.values())) < CALLS:
            self.moment += 1
            self.step(faults)
        for key in KEYS:  # the final value of each key
            self.call(self.callers[0], KeyAsk(KeyOp.GET, key))
        for _ in range(PATIENCE_STEPS):
            self.moment += 1
            if not any(one.ask.op is not KeyOp.WAIT for caller in self.callers for one in caller.under_way.values()):
                return self.history
            self.step(0.0, calls=False)
        raise Unanswered(f"after {PATIENCE_STEPS} steps without a fault calls are open")

    def step(self, faults: float, *, calls: bool = True) -> None:
        caller, draw = self.draw.choice(self.callers), self.draw
        if draw.random() < faults:
            self.fault(caller)
            return
        match draw.randrange(5):
            case 0 if calls and len(caller.under_way) < AT_A_TIME:
                self.call(caller, self.ask())
            case 1:
                self.now += draw.choice((0.1, 1.0, 3.0))
                for one in self.callers:
                    self.to_scheduler += one.calls.due(one.sender, self.now, one.term)
            case 2 | 3:
                self.pass_of_scheduler(kill_at=0)
            case 4 if self.to_callers:
                self.hear(self.to_callers.pop(draw.randrange(min(3, len(self.to_callers)))))

    def fault(self, caller: Caller) -> None:
        draw = self.draw
        match draw.randrange(7):
            case 0 if self.is_durable:
                self.pass_of_scheduler(kill_at=draw.randint(1, 4))
            case 1 if self.to_scheduler:
                self.to_scheduler.pop(draw.randrange(len(self.to_scheduler)))
                self.lost += 1
            case 2 if self.to_callers:
                self.to_callers.pop(draw.randrange(len(self.to_callers)))
                self.lost += 1
            case 3 if self.to_scheduler:
                self.to_scheduler.insert(draw.randrange(len(self.to_scheduler) + 1), draw.choice(self.to_scheduler))
                self.repeated += 1
            case 4:  # a partition: one caller's connection breaks and returns
                self.to_scheduler = [call for call in self.to_scheduler if call.sender.session != caller.session]
                self.to_callers = [answer for answer in self.to_callers if answer.session != caller.session]
                caller.calls.say_all_again(self.now)
            case 5 if caller.under_way:
                ticket = draw.choice(list(caller.under_way))
                caller.calls.give_up(ticket)
                del caller.under_way[ticket]
            case 6:  # kill -9 of a caller; a new one replaces it
                self.callers.remove(caller)
                self.let_in()
                self.to_scheduler = [call for call in self.to_scheduler if call.sender.session != caller.session]
                self.store.forget_callers_but({one.session for one in self.callers})

    # ---- callers

    def let_in(self) -> None:
        self.tickets += 1
        self.callers.append(Caller(f"s{self.tickets}", self.build.calls(), self.term))

    def ask(self) -> KeyAsk:
        draw, key = self.draw, self.draw.choice(KEYS)
        self.values += 1
        value = msgspec.msgpack.encode(self.values)
        durable = self.is_durable or draw.random() < 0.3
        seen = [one.answer.version for one in self.history[key] if one.answer is not None]
        version = draw.choice([0, *seen[-3:]])
        match draw.choice(list(KeyOp)):
            case KeyOp.PUT:
                return KeyAsk(KeyOp.PUT, key, value, is_durable=durable)
            case KeyOp.DELETE:
                return KeyAsk(KeyOp.DELETE, key, version=version if draw.random() < 0.5 else 0)
            case KeyOp.ADD:
                return KeyAsk(KeyOp.ADD, key, amount=draw.randint(1, 3), is_durable=durable)
            case KeyOp.COMPARE_AND_SET:  # an existing key is already durable
                return KeyAsk(KeyOp.COMPARE_AND_SET, key, value, version, is_durable=durable and version == 0)
            case KeyOp.WAIT:
                return KeyAsk(KeyOp.WAIT, key, version=version)
        return KeyAsk(KeyOp.GET, key)

    def call(self, caller: Caller, ask: KeyAsk) -> None:
        self.tickets += 1
        called = Called(ask, self.moment)
        self.history[ask.key].append(called)
        caller.under_way[self.tickets] = called
        caller.calls.begin(self.tickets, ask, self.now)
        self.to_scheduler += caller.calls.due(caller.sender, self.now, caller.term)

    def hear(self, answer: KeyAnswer) -> None:
        caller = next((one for one in self.callers if one.session == answer.session), None)
        if caller is None or (answer.term < caller.term and not self.build.takes_old_answers):
            return
        ticket = caller.calls.answered(answer.number)
        if ticket is not None:
            called = caller.under_way.pop(ticket)
            called.ended, called.answer = self.moment, answer

    # ---- the scheduler

    def pass_of_scheduler(self, kill_at: int) -> None:
        """Take some messages, save, answer. Killed at 1: before saving; 2: before answering; 3: while answering."""
        taken = [self.to_scheduler.pop(0) for _ in range(min(len(self.to_scheduler), self.draw.randint(1, 4)))]
        records: list[bytes] = []
        answers: list[KeyAnswer] = []
        for call in taken:
            ready = self.store.take(call)
            records += [SCHEMA.pack(record) for record in ready.records]
            answers += ready.answers
        if self.build.speaks_first:
            self.to_callers += answers
            answers = []
        if kill_at == 1:
            self.killed()
            return
        self.save(records)
        if self.draw.random() < 0.1:
            self.compact([SCHEMA.pack(record) for record in self.store.snapshot()])
        if kill_at == 2:
            self.killed()
            return
        self.to_callers += answers[: len(answers) // 2] if kill_at == 3 else answers
        if kill_at:
            self.killed()

    def save(self, records: list[bytes]) -> None:
        """Make the records durable."""
        self.journal += records

    def compact(self, snapshot: list[bytes]) -> None:
        """Replace the journal by the snapshot."""
        self.journal = snapshot

    def stored(self) -> list[bytes]:
        """Return the durable records, as a new scheduler reads them."""
        return self.journal

    def killed(self) -> None:
        """Start a new scheduler. Messages on the way to the old one are lost or arrive late."""
        self.kills += 1
        self.term += 1
        self.store = self.build.reads([SCHEMA.unpack(record) for record in self.stored()], self.term)
        self.to_scheduler = [call for call in self.to_scheduler if self.draw.random() < 0.3]
        for answer in self.to_callers:
            if self.draw.random() < 0.3:
                self.hear(answer)
        if self.draw.random() < 0.5:
            self.to_callers = []
        for caller in self.callers:
            caller.term = self.term
            caller.calls.say_all_again(self.now)
