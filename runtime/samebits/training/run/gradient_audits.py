"""Audit gradients (AUDIT=K): at every K-th step, another rank recomputes one rank's local gradient.

The audit runs on every rank just before ``optimizer.step()``. The weights still are those of the last commit, so a
wrong gradient costs only this step. ``core.watch.audits`` assigns the roles and decides what follows.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NoReturn

from samebits.core.watch.audits import Follows, Known, Roles, follows, judge, roles, sentence, teller, why_it_ends
from samebits.errors import GenerationEndedError, UnequalError
from samebits.service import log
from samebits.training.group import ddp, transfer
from samebits.training.group.group import is_communication_failure
from samebits.training.process.context import Worker
from samebits.training.state.base_state import State
from samebits.training.state.data.audited_batch import AuditedBatch, Computed, names_of
from samebits.training.state.local_sgd import LocalSGD

_MOST_BYTES = 2**30
"""Size limit in bytes; larger batches are not sent."""
_NOTHING = -1
"""Marks a value that was not computed."""


class Audits:
    """Runs the audits in one process.

    Args:
        process: the worker, whose settings ask for audits.
        state: the state, whose steps are counted.
        saved_by: returns the step of the newest checkpoint up to a given step; 0 if none is known.
    """

    def __init__(self, process: Worker, state: State, saved_by: Callable[[int], int]) -> None:
        self._process = process
        self._state = state
        self._saved_by = saved_by
        self._every = process.settings.audit
        self._batch: AuditedBatch | None = None
        self._is_given_up = False
        self._done = 0  # the last step that was audited
        self._wrong: Counter[int] = Counter()  # wrong gradients by step
        self._clean = 0  # the last step at which this process's gradient was correct
        self._said: set[str] = set()

    def begins(self) -> None:
        """Begin a generation."""
        if not self._every:
            return
        if isinstance(self._state, LocalSGD):
            self._say_once("with LocalSGD, each rank trains alone and at its own pace")
            return
        self._done = 0
        self._follow()

    def close(self) -> None:
        """Stop keeping batches, and remove the module's hooks."""
        if self._batch is not None:
            self._batch.close()
            self._batch = None

    def before_step(self) -> None:
        """Audit the step if it is due. A collective at every multiple of AUDIT.

        Raises:
            GenerationEndedError: a gradient was wrong, and the step is repeated.
            UnequalError: the gradient was wrong again; this process's last commit is then not saved to disk.
        """
        if not self._every:
            return
        is_followed = self._batch is not None
        if not is_followed:
            self._follow()
        step, generation = self._state.completed_steps + 1, self._process.generation
        if generation is None or step % self._every or step == self._done:
            return
        self._done = step
        who = roles(step, self._every, generation.world_size)
        if who is None:
            self._say_once("the world has a single rank, so no other rank can recompute a gradient")
            return
        if self._batch is not None and not is_followed:
            self._audit(step, who, generation.rank, None)  # built in this generation: its first step was not seen
        else:
            self._audit(step, who, generation.rank, self._taken() if generation.rank == who.audited else None)

    def _follow(self) -> None:
        wrappers = ddp.wrappers()
        if len(wrappers) == 1:
            self._batch = AuditedBatch(wrappers[0], self._wants)

    def _wants(self) -> bool:
        generation = self._process.generation
        step = self._state.completed_steps + 1
        if self._is_given_up or generation is None or step % self._every or step == self._done:
            return False
        who = roles(step, self._every, generation.world_size)
        return who is not None and who.audited == generation.rank

    def _taken(self) -> tuple[bytearray, Computed] | None:
        if self._is_given_up:
            return None
        if self._batch is None:
            self._say_once(
                "exactly one DistributedDataParallel module can be audited, but there is none or more than one"
            )
            return None
        taken = self._batch.take(_MOST_BYTES)
        if isinstance(taken, str):
            self._say_once(taken)
            return None
        return taken

    def _audit(self, step: int, who: Roles, rank: int, taken: tuple[bytearray, Computed] | None) -> None:
        device = self._process.device
        has_module = self._batch is not None and not self._is_given_up
        takes_part = has_module if rank != who.audited else taken is not None
        if not all(transfer.gather(int(takes_part), device)):
            return
        computed: Computed | None = None
        if taken is not None:
            packed, computed = taken
            transfer.send_bytes(packed, who.auditor, device)
        elif rank == who.auditor:
            computed = self._again(transfer.receive_bytes(who.audited, _MOST_BYTES * 2, device))
        values = transfer.gather(_value(computed), device)
        if values[who.auditor] == _NOTHING:
            return
        if values[who.audited] == values[who.auditor]:
            if rank == who.audited:
                self._clean = step
            return
        self._differs(step, who, rank, taken, computed)

    def _differs(
        self, step: int, who: Roles, rank: int, taken: tuple[bytearray, Computed] | None, computed: Computed | None
    ) -> None:
        """Let the audited rank and a third rank recompute the gradient, and reach the same decision on all ranks."""
        device = self._process.device
        own: Computed | None = None
        if taken is not None:
            packed, _ = taken
            if who.third is not None:
                transfer.send_bytes(packed, who.third, device)
            own = self._again(memoryview(packed))
        elif rank == who.third:
            computed = self._again(transfer.receive_bytes(who.audited, _MOST_BYTES * 2, device))
        values = transfer.gather(_value(computed), device)
        own_value, clean = transfer.tell([_value(own), self._clean], who.audited, device)
        self._wrong[step] += 1
        times = max(transfer.gather(self._wrong[step], device))  # a process started later has no count of its own
        self._wrong[step] = times
        part = self._first_part(who, computed)
        fault = judge(who, dict(enumerate(values)), own_value, times)
        then = follows(fault, times)
        text = sentence(who, fault, part, then)
        log.warn(f"step {step}: {text}")
        if rank == teller(who, fault):
            self._process.agent.report_anomaly(step, text, is_verdict=True, comes_again=then is Follows.TAKE_AGAIN)
        self._wait_for_all()  # a rank that left now would look like a lost peer to those still deciding
        if then is Follows.STOP:
            raise UnequalError(why_it_ends(step, text, who, Known(clean, self._saved_by(clean))))
        if then is Follows.TAKE_AGAIN:
            raise GenerationEndedError(f"rank {who.audited}'s gradient of step {step} was found wrong")
        self._is_given_up = then is Follows.GIVE_UP

    def _wait_for_all(self) -> None:
        try:
            transfer.gather(0, self._process.device)
        except Exception as error:
            if not is_communication_failure(error):
                raise  # otherwise another rank decided the same and left

    def _first_part(self, who: Roles, computed: Computed | None) -> str:
        """Return, on every rank, the name of the first parameter whose gradient differs."""
        assert self._batch is not None, "all ranks have the same wrapper"
        names, device = names_of(self._batch.module), self._process.device
        digests = computed.digests if computed is not None else (0,) * len(names)
        audited, auditor = (
            transfer.tell([_signed(one) for one in digests], source, device) for source in (who.audited, who.auditor)
        )
        return names[Computed(tuple(audited)).first_other(Computed(tuple(auditor)))]

    def _again(self, packed: memoryview) -> Computed | None:
        """Recompute a gradient from the bytes. If that fails, log a warning and return None."""
        assert self._batch is not None, "all ranks have the same wrapper"
        try:
            with self._alone():
                return self._batch.compute_again(packed)
        except Exception as error:
            self._say_once(f"another rank's gradient could not be computed again ({type(error).__name__}: {error})")
            return None

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Context manager that refuses collectives, because no other rank would take part."""
        assert self._process.group is not None, "an audit is within a generation"
        breaker = self._process.group.breaker
        before, breaker.before_launch = breaker.before_launch, _refuse
        try:
            yield
        finally:
            breaker.before_launch = before

    def _say_once(self, why: str) -> None:
        if why not in self._said:
            self._said.add(why)
            log.warn(f"AUDIT={self._every}: this loop's gradients are not audited: {why}")


def _refuse(_group: object) -> NoReturn:
    raise ValueError("its forward pass calls collectives itself")


def _value(computed: Computed | None) -> int:
    return _NOTHING if computed is None else computed.value()


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number
