"""Agents with one decision replaced: a worker that accepts too much, sends too little, or does not let go."""

from __future__ import annotations

import math
from typing import Any

from samebits.core.agent.agent_core import AgentCore, LinkState
from samebits.core.agent.agent_events import AgentReady, BreakGroup, Completed, Connected, Over, Trains
from samebits.core.messages import Activity, Fenced, GenerationStarted, Heartbeat, Refused, RoundOpened
from samebits.core.point import Point
from samebits.core.values import replace
from tests.simulation.mutants.mutant import Mutant
from tests.simulation.mutants.of_core import ZOMBIES, CorrectsNobody


class BelievesStaleWords(AgentCore):
    """Compares neither job nor term nor incarnation of a message."""

    def _is_for_me(self, message: RoundOpened | GenerationStarted) -> bool:
        return self.seated


class TakesAnyGeneration(AgentCore):
    """Starts any announced generation, even an old one or one of a round that it did not join."""

    def _generation_started(self, message: GenerationStarted) -> None:
        self.generation, self.joined = 0, message.round
        super()._generation_started(message)


class RegistersOnce(AgentCore):
    """Continues after a broken connection as if nothing had happened; a scheduler that hears it can repair that."""

    def _dispatch(self, event: Any) -> None:
        if isinstance(event, Connected) and self.seated:
            self._link = replace(self._link, state=LinkState.REGISTERED)
        else:
            super()._dispatch(event)


class WaitsToBeSpokenTo(AgentCore):
    """Sends nothing after a broken connection."""

    def _dispatch(self, event: Any) -> None:
        super()._dispatch(event)
        if isinstance(event, Connected) and self.seated:
            self._ready.sends, self._ask_at = [], math.inf


class HeartbeatsSayLittle(AgentCore):
    """Heartbeats do not say where the sender is."""

    def step(self, event: Any, now: float) -> AgentReady:
        ready = super().step(event, now)
        ready.sends = [
            replace(send, activity=Activity.TRAINING) if isinstance(send, Heartbeat) else send for send in ready.sends
        ]
        return ready


class HoldsOnToItsGroup(AgentCore):
    """Does not tell the process to leave its group when a round opens."""

    def step(self, event: Any, now: float) -> AgentReady:
        ready = super().step(event, now)
        ready.notices = [notice for notice in ready.notices if not isinstance(notice, BreakGroup)]
        return ready


class DeafToFencing(AgentCore):
    """Stays although its seat was reassigned."""

    def _hear(self, message: Any) -> None:
        if not isinstance(message, Fenced):
            super()._hear(message)


class JoinsFromWithinItsGroup(AgentCore):
    """Joins the round at once with what it entered with, while its process still trains."""

    def _generation_started(self, message: GenerationStarted) -> None:
        entered = self._holdings
        super()._generation_started(message)
        self._last_entered = entered or getattr(self, "_last_entered", None)

    def _round_opened(self, message: RoundOpened) -> None:
        super()._round_opened(message)
        if self._holdings is None and getattr(self, "_last_entered", None) is not None and self._link.is_registered:
            self._holdings = self._last_entered
            self._join()


class DoneBeforeItIs(AgentCore):
    """Reports its last commit as durable as soon as its group is formed."""

    def _dispatch(self, event: Any) -> None:
        super()._dispatch(event)
        if isinstance(event, Trains) and self.activity is Activity.TRAINING:
            self._become(Activity.DONE)


class ReturnsAlone(AgentCore):
    """Lets ``elastic.run`` return when this rank is done."""

    def _dispatch(self, event: Any) -> None:
        super()._dispatch(event)
        if isinstance(event, Completed) and self.activity is Activity.DONE:
            self._ready.notices.append(Over(Point(event.step, event.generation)))


class WaitsTooLong(AgentCore):
    """Asks for its seat again only after more than twice the time that the refusal names."""

    def _refused(self, message: Refused) -> None:
        super()._refused(message)
        self._ask_at += message.retry_after_s + 5.0


class StaysInItsRound(AgentCore):
    """Having joined a round, joins no other before its generation has started."""

    def _round_opened(self, message: RoundOpened) -> None:
        if self.activity is not Activity.WAITING or self.joined is None or self.joined.term == message.round.term:
            super()._round_opened(message)


class PublishesOnce(AgentCore):
    """Sends its address once: if that is lost, so is the group."""

    def _publish(self) -> None:
        super()._publish()
        self._blob = None


NEWS = {"p_drop": 0.2}
STALE = {"is_ordered": False, "has_stragglers": True, "p_slow": 0.2, "slow_s": 10.0, "p_duplicate": 0.3}

MUTANTS: tuple[Mutant, ...] = (
    Mutant("agent: stale message accepted", frozenset({"S11", "S8", "S1"}), 300, agent_type=BelievesStaleWords),
    Mutant(
        "agent: any generation begun",
        frozenset({"S8", "S11"}),
        300,
        agent_type=TakesAnyGeneration,
        changes=STALE,
    ),
    Mutant(
        "agent: sends nothing after a broken connection",
        frozenset({"L1", "L4", "L5", "S18"}),
        100,
        agent_type=WaitsToBeSpokenTo,
    ),
    Mutant(
        "agent: registers once, and is not corrected",
        frozenset({"L1", "L4", "L5", "S18"}),
        100,
        core_type=CorrectsNobody,
        agent_type=RegistersOnce,
    ),
    Mutant("agent: heartbeats omit the sender's state", frozenset({"L1", "L5"}), 50, agent_type=HeartbeatsSayLittle),
    Mutant("agent: group not left", frozenset({"L1", "L5", "S11"}), 100, agent_type=HoldsOnToItsGroup),
    Mutant("agent: ignores fencing", frozenset({"L1", "L3", "L5"}), 300, agent_type=DeafToFencing, changes=ZOMBIES),
    Mutant(
        "agent: joins while it trains", frozenset({"S8", "S9", "S11", "L1"}), 100, agent_type=JoinsFromWithinItsGroup
    ),
    Mutant("agent: reports its last commit as durable too early", frozenset({"S19"}), 50, agent_type=DoneBeforeItIs),
    Mutant("agent: returns alone", frozenset({"S19"}), 20, agent_type=ReturnsAlone),
    Mutant("agent: waits too long", frozenset({"L2"}), 300, agent_type=WaitsTooLong),
    Mutant("agent: stays in a dead scheduler's round", frozenset({"L1", "L4"}), 300, agent_type=StaysInItsRound),
    Mutant("agent: sends its address only once", frozenset({"L1"}), 300, agent_type=PublishesOnce, changes=NEWS),
)
