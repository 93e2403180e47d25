"""``samebits.elastic``: training functions that survive the loss of their peers, in the same process.

Where Horovod has the same function, the name is the same. ``run.elastic_run`` implements a call of :func:`run`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from samebits.core.point import Point
from samebits.errors import CommunicationError, HostsUpdatedInterrupt, UsageError
from samebits.service import log
from samebits.service.agent import Agent
from samebits.store.retaken_report import RetakenReport, read_report, write_report
from samebits.training.checkpoint.rollback_copies import bytes_in, has_room_for
from samebits.training.group import ddp
from samebits.training.group.calling_place import calling_place, place_of
from samebits.training.process import context
from samebits.training.process.context import Worker
from samebits.training.run.elastic_run import ElasticRun
from samebits.training.run.retaken_steps import Extent, Restart, RetakenSteps
from samebits.training.state.base_state import State
from samebits.training.state.data.sampler import ElasticSampler
from samebits.training.state.handlers import StateHandler, register_handler
from samebits.training.state.local_sgd import LocalSGD
from samebits.training.state.object_state import ObjectState
from samebits.training.state.script.after_commit import runs_more_after_loops
from samebits.training.state.script.hidden_state import HiddenChange, HiddenStateLook, sentences_of
from samebits.training.state.script.loop_habits import OutsideCounters
from samebits.training.state.torch_state import TorchState

__all__ = [
    "CommunicationError",
    "ElasticSampler",
    "HostsUpdatedInterrupt",
    "LocalSGD",
    "ObjectState",
    "State",
    "StateHandler",
    "TorchState",
    "load_dcp",
    "register_handler",
    "run",
]

AnyState = TypeVar("AnyState", bound=State)
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_COPIES = 2
"""Copies of the state in memory while steps are taken twice: one commit stays intact while the next is copied."""


def run(
    function: Callable[Concatenate[AnyState, Parameters], Result],
) -> Callable[Concatenate[AnyState, Parameters], Result | None]:
    """Decorate a training function so that it survives the loss of any process.

    Args:
        function: called as ``function(state, …)``, again after every loss and every change of the world size. It must
            continue from ``state``.

    The decorated function returns what ``function`` returns. In a process that is restarted after training has
    finished, ``function`` is not called: the state becomes the final state, and the result is None. A job trains only
    once. With ``ENABLE_RECOVERY=0`` the function is called once, without recovery.

    Raises:
        UsageError: the function is a generator or async; or, when it is called, the first argument is not a state or
            the job has already trained.

    Example::

        model = torch.nn.parallel.DistributedDataParallel(model)
        state = samebits.elastic.TorchState(model, optimizer, rng="per_step", seed=1)

        @samebits.elastic.run
        def train(state):
            while state.completed_steps < 5:
                inputs = torch.randn(8, 4)
                optimizer.zero_grad()
                loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
                loss.backward()
                optimizer.step()
                state.report(loss=loss, total_steps=5)
                state.commit()

        train(state)
    """

    if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
        raise UsageError(
            f"{calling_place()}: samebits.elastic.run decorates {function.__name__}(), which has a `yield` or is "
            "`async`, so calling it trains nothing. Fix: decorate an ordinary function that trains and returns"
        )

    @functools.wraps(function)
    def wrapper(state: AnyState, /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result | None:
        process = context.current("samebits.elastic.run")
        if not isinstance(state, State):
            raise UsageError(
                f"{calling_place()}: the training function was called with a {type(state).__name__}; expected a state. "
                "Fix: state = samebits.elastic.TorchState(model, optimizer, …), then train(state)"
            )
        counters = OutsideCounters(function)
        asked = process.settings.hidden_state

        def told(findings: list[HiddenChange]) -> None:
            _tell_of_hidden(process, state, sentences_of(findings, any_world_size=state.is_world_size_free))
            if retaken is not None:
                retaken.named()

        look = HiddenStateLook(function, state, told, at_length=asked in ("stop", "check"))
        retaken = _retaken_steps(process, state, look, function)

        def call() -> Result:
            counters.begin()
            look.called()
            if asked != "off" and not look.has_ended:  # the end of a generation has detached it
                state.look_for_hidden(look)
            _tell_of_hidden(process, state, state.hidden_messages.take_lost())
            with _told_of_a_complete_epoch(state):
                result = function(state, *args, **kwargs)
            state.finish()
            return result

        if not process.settings.enable_recovery:
            with process.trains():
                return _run_once(process, state, call)
        if process.has_trained:
            raise UsageError(f"{calling_place()}: {_SECOND_RUN}")
        if isinstance(state, ObjectState):
            ddp.require_all_among(state.weights())
        process.has_trained = True
        session = ElasticRun(process, state, retaken)
        try:
            with process.trains():
                result = session.run(call)
        finally:
            session.close()
        process.end_unneeded_spare()
        return result

    return wrapper


_SECOND_RUN = (
    "samebits.elastic.run was called a second time, and this call trains nothing: a job trains once. Fix: put all "
    "phases or folds into the one training function, and which of them is under way into the state, as in "
    "`while state.fold < 3: …; state.fold += 1`; or start a job for each fold"
)
_OF_NO_BATCH = (UnboundLocalError, ZeroDivisionError, IndexError)


@contextlib.contextmanager
def _told_of_a_complete_epoch(state: State) -> Iterator[None]:
    """Context manager that explains errors of a function that needs a batch after a loop without any batch left.

    A restore point may be the last batch of an epoch. The end of the epoch is then repeated, and its loop has no batch.
    """
    began_at = state.completed_steps
    try:
        yield
    except _OF_NO_BATCH as error:
        epoch = state.complete_epoch
        if epoch is None or state.completed_steps != began_at:
            raise
        raise UsageError(
            f"{place_of(error)}: {type(error).__name__}: {error}. Training resumed here after the last batch of epoch "
            f"{epoch}, so the loop over the loader had no batch left, and the variables that it sets are missing. Fix: "
            "set them before the loop, or keep them in the state; the corrected script resumes at this step"
        ) from error


def _retaken_steps(
    process: Worker, state: State, look: HiddenStateLook, function: Callable[..., object]
) -> RetakenSteps | None:
    """Return the object that repeats steps for comparison, or None if HIDDEN_STATE does not ask for it."""
    settings = process.settings
    if settings.hidden_state not in ("stop", "check"):
        return None
    extent = Extent.CHECK if settings.hidden_state == "check" else Extent.JOB

    def has_room(contents: Any) -> bool:
        ranks_here = 1 if process.generation is None else process.generation.local_world_size
        return has_room_for(_COPIES * bytes_in(contents) * ranks_here)

    def tell(report: RetakenReport) -> None:
        if context.get_rank() == 0 or report.failure:  # rank 0 may be terminated before it fails itself
            write_report(settings.log_dir, report)

    code = getattr(inspect.unwrap(function), "__code__", None)
    has_tail = code is not None and runs_more_after_loops(code)
    agent = process.agent
    is_check = extent is Extent.CHECK
    return RetakenSteps(
        state,
        extent,
        lambda: look.findings,
        has_room,
        tell,
        has_tail=has_tail,
        restart=Restart(settings.log_dir, lambda: agent.committed_point) if is_check else None,
        report=read_report(settings.log_dir) if is_check else None,
        set_at_first=lambda: look.set_at_first,
    )


def _tell_of_hidden(process: Worker, state: State, texts: Sequence[str]) -> None:
    for text in texts if process.settings.hidden_state != "off" else ():
        state.hidden_messages.add(text)
        if context.get_rank() == 0:
            log.warn(text)
        process.agent.report_anomaly(state.completed_steps, text)  # the same on every rank, so it is logged once


def load_dcp(state: ObjectState, path: str | os.PathLike[str], names: Sequence[str] | None = None) -> None:
    """Start a job from a ``torch.distributed.checkpoint`` directory, at any world size.

    Call this on every rank, before the training function. A job that resumes uses its own restore point instead, so the
    call may stay in the script. Random number states and ``completed_steps`` are not loaded. The format has no hashes,
    so damage is detected only if it makes the directory unreadable. The pickled index is read with an unpickler that
    accepts only index classes.

    Args:
        state: the state, with its model built and, if required, sharded.
        path: a directory from ``samebits ckpt export --format dcp``, or from ``torch.distributed.checkpoint.save`` of
            ``{"model": model.state_dict(), "optimizer": optimizer.state_dict(), …}``.
        names: names of the values in the state to load, such as ``["model"]``; None: all values.

    Raises:
        UsageError: the training function is running, or the state has no value with one of the names.
        CheckpointError: the directory is unreadable, lacks a value, or has a value that cannot be read without running
            its code.
    """
    from samebits.training.checkpoint.dcp import load_into  # takes half a second, which other callers need not spend

    load_into(state, Path(path), names)


class _CountingSession:
    """The session used with ENABLE_RECOVERY=0, in which only this process remembers commits."""

    recovers = False

    def __init__(self, agent: Agent, state: State) -> None:
        self._agent = agent
        self._state = state

    def before_step(self) -> None:
        """Do nothing, because there is no recovery to prepare for."""

    def save(self) -> None:
        self._agent.step = self._state.completed_steps
        self._state.remember(Point(self._state.completed_steps, 1))

    def flush(self) -> None:
        """Do nothing: nothing is saved."""

    def check(self) -> None:
        self._agent.check()

    def sync(self) -> None:
        raise UsageError("state.sync() needs recovery. Fix: set ENABLE_RECOVERY=1")


def _run_once(process: Worker, state: State, call: Callable[[], Result]) -> Result:
    state.bind(_CountingSession(process.agent, state), context.get_rank())
    state.begin(Point(0, 1))
    try:
        return call()
    finally:
        state.bind(None, context.get_rank())
