"""The rendezvous of ``torchrun --rdzv-backend=samebits``.

Each torchrun agent holds one seat in a SameBits job whose workers are the agents. The scheduler decides which agents
are members; torch's agent starts, watches and restarts the processes of the user's script.

Each generation has its own store, in the agent of rank 0. If that agent dies, its generation is over anyway, and the
next generation cannot see keys of the previous one.
"""

from __future__ import annotations

import atexit
import re
import sys
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import NoReturn, Protocol

from torch.distributed import DistError, TCPStore
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from samebits import config
from samebits.config import Settings
from samebits.core.messages import GenerationStarted, Holdings
from samebits.core.point import Point
from samebits.core.reports import FINAL, Digest
from samebits.errors import (
    FencedError,
    FormationTimeoutError,
    GenerationEndedError,
    JobFailedError,
    JobInterruptedError,
    JobStoppedError,
    ListenError,
    RefusedError,
    SameBitsError,
    SchedulerUnreachableError,
    ScriptFailedError,
    UntrainedError,
)
from samebits.printable import listed
from samebits.service import log
from samebits.service.agent import Agent
from samebits.service.scheduler_address import address_towards
from samebits.service.torchrun_seat import offer, offered_port
from samebits.start_folder import start_folder
from samebits.store.child_processes import kill_left_behind
from samebits.tracebacks import failure_in
from samebits.training.torch_private import WorkerFailures

BACKEND = "samebits"
NO_ID = "none"
"""The run id that torchrun sets without --rdzv-id."""
STORE_TIMEOUT_S = 60.0
BLAME_S = 5.0  # how long a node whose workers failed waits for news that another node's workers failed first
ANSWER_S = 2.0  # how long a node that has ended the job waits for the first cause
_FINISHED = b"torchrun"
_NOTHING_HELD = Holdings((), own_parts=False, numerics=())
_OPTIONS = {
    "--nnodes": ["WORKER_NUM", "SPARE_NUM", "MIN_WORKER_NUM", "MAX_WORKER_NUM"],
    "--rdzv-id": ["JOB_NAME"],
    "--rdzv-endpoint": ["SCHED_HOST", "SCHED_PORT"],
}
"""torchrun's options, with the variables that they set."""
_ENDS_OF_THE_JOB = (JobStoppedError, JobInterruptedError, JobFailedError, ScriptFailedError, UntrainedError)
_RANK = re.compile(r"global rank \d+ \(pid \d+\)")


class SchedulerKeeper(Protocol):
    """Keeps the job's scheduler running on the machine of the endpoint."""

    on_failure: Callable[[SameBitsError], object]

    @property
    def is_here(self) -> bool:
        """Whether a scheduler of the job may be started on this machine."""

    def link(self, job: str, *, is_up: bool) -> None:
        """Record whether the job's scheduler can be reached."""

    def stop_job(self, by: str) -> bool:
        """End the job for all of its processes, and return whether the scheduler received the request."""

    def record(self, text: str) -> bool:
        """Record a decision in the job's history, and return whether the scheduler received it."""

    def let_go(self) -> None:
        """Stop starting schedulers."""

    def close(self) -> None:
        """Stop watching."""


# ---- errors


class _EndsTorchrun(SystemExit):
    """Base class of errors that end torchrun without a traceback and with this package's exit code."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.code = status


class JobOverError(_EndsTorchrun, RendezvousClosedError):
    """The job was ended or has finished."""


class NoSeatError(_EndsTorchrun, RendezvousConnectionError):
    """No scheduler answers, or the scheduler refuses this agent."""


class ReplacedError(_EndsTorchrun, RendezvousStateError):
    """Another agent has taken this agent's seat."""


class TooLateError(_EndsTorchrun, RendezvousTimeoutError):
    """The rendezvous did not complete in time."""


def _raise(error: SameBitsError) -> NoReturn:
    """Raise a SameBits error as the class that torch documents for it."""
    match error:
        case FencedError():
            kind: type[_EndsTorchrun] = ReplacedError
        case FormationTimeoutError():
            kind = TooLateError
        case _ if isinstance(error, _ENDS_OF_THE_JOB):
            kind = JobOverError
        case _:
            kind = NoSeatError
    text = str(error)
    if isinstance(error, RefusedError | ListenError | SchedulerUnreachableError):
        text += _with_options(text)
    log.warn(text)
    raise kind(text, error.exit_code) from None


def _may_return(error: SameBitsError) -> bool:
    return isinstance(error, FencedError) and error.may_return


def _with_options(text: str) -> str:
    """Return which options of torchrun set the variables that a message names."""
    named = [
        f"{option} sets {listed(names)}" for option, names in _OPTIONS.items() if any(name in text for name in names)
    ]
    return f". With torchrun, {listed(named)}" if named else ""


# ---- settings


def create(
    parameters: RendezvousParameters, keep_scheduler: Callable[[Settings, Mapping[str, str], bool], SchedulerKeeper]
) -> RendezvousHandler:
    """Create the rendezvous of this process's agent.

    Args:
        parameters: the parameters of torchrun's command line.
        keep_scheduler: starts a scheduler with this environment if it may and if the endpoint is on this machine.

    Raises:
        RendezvousError: an option or a variable is invalid, or the endpoint cannot be listened on.
    """
    log.set_up("torchrun")
    try:
        settings, environment = _settings_of(parameters)
        may_start = parameters.get_as_bool("is_host", default=True) is not False
        return SamebitsRendezvous(parameters, settings, keep_scheduler(settings, environment, may_start))
    except SameBitsError as error:
        _raise(error)


def _settings_of(parameters: RendezvousParameters) -> tuple[Settings, dict[str, str]]:
    """Return this agent's settings, and the environment of a scheduler for its job."""
    told = {
        "WORKER_NUM": str(parameters.min_nodes),
        "SPARE_NUM": str(parameters.max_nodes - parameters.min_nodes),
        "JOB_NAME": parameters.run_id if parameters.run_id != NO_ID else "torchrun",
        "ENABLE_RECOVERY": "1",
        **_address_in(parameters.endpoint),
    }
    timeout_s = parameters.get("join_timeout")
    if timeout_s is not None:
        told["TOPO_TIMEOUT"] = str(timeout_s)
    environment = config.environment_of_job(told)
    settings, warnings = config.read({"NODE_ID": config.random_node_id(), **environment, "ROLE": "worker"})
    for warning in warnings:
        log.warn(warning)
    log_dir = str(settings.recovery_path)  # otherwise a later job in this folder would find this job's logs
    return settings, {**environment, "LOG_DIR": log_dir, "ROLE": "scheduler"}


def _address_in(endpoint: str) -> dict[str, str]:
    """Return SCHED_HOST and SCHED_PORT for ``host[:port]``, several of these, or ``file:/path``."""
    text = endpoint.strip()
    if not text:
        return {}
    host, colon, port = text.rpartition(":")
    if "," in text or not (colon and port.isdecimal() and (":" not in host or host.endswith("]"))):
        return {"SCHED_HOST": text}
    return {"SCHED_HOST": host, "SCHED_PORT": port}


# ---- the rendezvous


class SamebitsRendezvous(RendezvousHandler):
    """One agent's seat in the job, and its place in each generation.

    Args:
        parameters: the parameters of torchrun's command line.
        settings: the settings made from the parameters.
        scheduler: keeps the job's scheduler running.
    """

    def __init__(self, parameters: RendezvousParameters, settings: Settings, scheduler: SchedulerKeeper) -> None:
        self._parameters = parameters
        self._settings = settings
        self._scheduler = scheduler
        self._agent = self._new_agent()
        self._job = ""  # set once the agent has a seat
        self._is_linked, self._link_lock = threading.Event(), threading.Lock()
        self._generation = 0
        self._failures = WorkerFailures()
        self._is_finished = False
        self._has_left = False
        self._undo_watch: Callable[[], None] = lambda: None
        self._store: TCPStore | None = None  # if this agent hosts it, it must live as long as its generation
        atexit.register(self._leave_at_exit)
        scheduler.on_failure = lambda error: self._agent.end(error)

    def get_backend(self) -> str:
        """Return the name of the backend."""
        return BACKEND

    def get_run_id(self) -> str:
        """Return torchrun's ``--rdzv-id``."""
        return self._parameters.run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for a place in the next generation. A standby agent waits here until it is needed.

        Raises:
            RendezvousError: no place is left for this agent.
        """
        try:
            if not self._job:
                self._register()
            elif failure := self._failures.take():
                self._scheduler.record(f"torchrun on node {self._agent.node} restarts all workers: {failure}")
            while True:
                try:
                    place = self._agent.enter(_NOTHING_HELD)
                except FencedError as fenced:
                    self._come_back(fenced)
                    continue
                if isinstance(place, Point):
                    self._is_finished = True
                    log.say("the job is finished")
                    raise JobOverError("the job is finished", 0)
                try:
                    return self._meet(place)
                except GenerationEndedError as ended:
                    log.say(f"generation {place.generation} is over: {ended}")
        except SameBitsError as error:
            _raise(error)

    def num_nodes_waiting(self) -> int:
        """Return 1 if the generation is over, which makes torch's agent stop its workers and meet again.

        Standby agents do not count. An agent that was replaced while it was silent also meets again, as a standby.

        Raises:
            RendezvousError: no place is left for this agent.
        """
        try:
            self._agent.check()
        except GenerationEndedError:
            return 1
        except SameBitsError as error:
            if _may_return(error):
                return 1
            _raise(error)
        return 0

    def is_closed(self) -> bool:
        """Return whether the job is over, as far as this agent knows."""
        return self._is_finished or self._agent.must_end is not None

    def set_closed(self) -> None:
        """End the job for all agents."""
        self._stop_job(f"node {self._agent.node} has closed the rendezvous")

    def shutdown(self) -> bool:
        """Leave the job.

        The error with which torch's agent ends, if any, decides what this means for the job.

        Raises:
            RendezvousError: the workers of this node failed because another node had failed first. It replaces the
                error of torch's agent, so that such a node ends with one exit code, whichever it notices first.
        """
        if self._has_left:
            return True
        self._has_left = True
        atexit.unregister(self._leave_at_exit)
        error, verdict = sys.exception(), None
        if not self._job or self.is_closed():
            verdict = self._agent.must_end
            self._agent.leave(on_purpose=True, text="torchrun has ended")
        elif error is not None:
            verdict = self._leave_after(error)
        else:
            self._leave_finished()
        self._scheduler.close()
        self._undo_watch()
        self._store = None
        if isinstance(error, ChildFailedError) and verdict is not None:
            _end_with_first_cause(error, verdict)
        return True

    # ---- seat and generation

    def _register(self) -> None:
        admitted = self._agent.register()
        self._job = admitted.job
        log.set_up(f"node {self._agent.node}")
        # A killed agent's workers may not notice for long, and would save checkpoints beside those that replace them.
        self._undo_watch = kill_left_behind(config.mark_agent(self._agent.session), self._agent.session)
        seat = "as a standby" if admitted.slot is None else f"slot {admitted.slot} of {admitted.world_size}"
        log.say(f"seated: {seat}, start {admitted.incarnation}, job {admitted.job}")
        with self._link_lock:
            self._scheduler.link(self._job, is_up=self._is_linked.is_set())

    def _new_agent(self) -> Agent:
        agent = Agent(self._settings, self._settings.job_name, self._settings.device or "cpu")
        agent.on_break, agent.on_link = self._interrupted, self._linked
        return agent

    def _come_back(self, fenced: FencedError) -> None:
        """Register again under a new session after a standby has taken this node's place.

        torch's agent has stopped the workers of the earlier generation before it meets again.

        Raises:
            SameBitsError: this agent may not return, or gets no seat.
        """
        if not fenced.may_return:
            raise fenced
        log.warn(f"{fenced}: this agent registers again, as a standby")
        self._undo_watch()
        self._agent.leave(on_purpose=True, text="fenced", status=FencedError.exit_code)
        self._agent, self._store = self._new_agent(), None
        self._register()

    def _linked(self, is_up: bool) -> None:
        with self._link_lock:
            (self._is_linked.set if is_up else self._is_linked.clear)()
            self._scheduler.link(self._job, is_up=is_up)

    def _interrupted(self, _reason: str) -> None:
        # The call acknowledges the end, since torch's agent checks only at its next poll, however long that takes.
        verdict = self._agent.verdict(0.0)
        if verdict is not None and not _may_return(verdict):
            self._scheduler.let_go()

    def _meet(self, place: GenerationStarted) -> RendezvousInfo:
        """Exchange the store's address with the other agents of this generation."""
        agent, self._store = self._agent, None
        timeout = timedelta(seconds=STORE_TIMEOUT_S)
        host = self._parameters.local_addr or address_towards(self._settings.sched_host, self._settings.sched_port)
        if place.rank == 0:
            self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        port = 0 if self._store is None else self._store.port
        offered = offered_port(self._settings, start_folder()) if self._scheduler.is_here else 0
        agent.publish(place.generation, f"{host} {port} {offered}".encode())
        found = [bytes(one).decode().split() for one in agent.address_map(place.generation)]
        offer(self._settings, next((int(one[2]) for one in found if int(one[2])), 0))
        address, port = found[0][0], int(found[0][1])
        try:
            store = self._store or TCPStore(address, port, is_master=False, timeout=timeout)
            bootstrap = RendezvousStoreInfo.build(place.rank, store, host)
        except DistError as error:
            where = f"the store of rank 0 at {address}, port {port}"
            raise GenerationEndedError(f"{where}, does not answer: {error}") from None
        self._generation = place.generation
        agent.trains(place.generation)
        log.say(f"generation {place.generation}: node rank {place.rank} of {place.world_size}")
        return RendezvousInfo(store, place.rank, place.world_size, bootstrap)

    # ---- the end

    def _leave_at_exit(self) -> None:
        """Leave the job in a process that ends without a shutdown, which torch skips after SIGINT and SIGTERM.

        The interpreter stops the agent's threads before the process ends, so the node would be considered hung.
        """
        self._agent.leave(on_purpose=False, text="torchrun was interrupted, as by Ctrl-C or SIGTERM", status=1)

    def _leave_finished(self) -> None:
        """After this agent's workers have finished, wait for those of all other agents."""
        agent, point = self._agent, Point(1, self._generation)
        try:
            agent.complete(point.generation, point.step, [Digest(point, FINAL, _FINISHED)])
            self._is_finished = True
        except GenerationEndedError as ended:
            # Workers that ended with status 0 cannot be in another generation.
            self._stop_job(f"the workers of node {agent.node} had ended with status 0 when others were lost: {ended}")
        except SameBitsError as error:
            log.warn(str(error))
        agent.leave(on_purpose=self._is_finished, text="its workers ended with status 0")

    def _leave_after(self, error: BaseException) -> SameBitsError | None:
        """Leave the job with the error that ended torch's agent, and return the error that ended the job, if known.

        If workers failed and no restart is left, the job ends on all nodes. If the agent itself failed, the node counts
        as lost, and a standby or a new agent can take its place.
        """
        if isinstance(error, ChildFailedError):
            text, status = _cause_in(error)
        else:
            text, status = f"torchrun failed: {type(error).__name__}: {error}", 1
        self._agent.speak_last(text)
        verdict = None
        if isinstance(error, ChildFailedError):
            # A worker that lost its peer may have failed before the peer's agent noticed the cause.
            verdict = None if status > 128 else self._agent.verdict(BLAME_S)
            if verdict is None:
                self._stop_job(f"torchrun on node {self._agent.node}, which has no restart left")
                verdict = self._agent.verdict(ANSWER_S)
                if verdict is not None and "first cause: " not in str(verdict):
                    verdict = None  # it repeats only this node's request
        self._agent.leave(on_purpose=False, text=text, status=status)
        return verdict

    def _stop_job(self, by: str) -> None:
        self._is_linked.wait(2 * self._settings.node_timeout_s)  # the scheduler may be restarting
        if not self._scheduler.stop_job(by):
            log.warn(f"the other nodes could not be told that the job ends: no scheduler answers ({by})")


def _end_with_first_cause(error: ChildFailedError, verdict: SameBitsError) -> None:
    """Print the first cause, which torch's error shows only on the node whose workers failed first.

    Raises:
        JobOverError: another node's workers failed first.
    """
    first = _RANK.search(str(verdict))  # errors without a message, reported at about the same time, are all named
    is_own = first is not None and _cause_in(error)[0].startswith(first[0])
    if isinstance(verdict, _ENDS_OF_THE_JOB) and not is_own:
        _raise(verdict)
    log.warn(str(verdict))


def _cause_in(error: ChildFailedError) -> tuple[str, int]:
    """Return how the first worker failed, as a sentence and as a shell's exit status."""
    rank, failure = error.get_first_failure()
    if failure.exitcode >= 0:
        how, status = f"ended with status {failure.exitcode}{_told_by(failure)}", failure.exitcode
    elif told := _told_by(failure):  # it raised an error, and then torch's threads aborted the exiting interpreter
        how, status = f"ended by signal {-failure.exitcode}{told}", 1
    else:
        how, status = f"was killed by signal {-failure.exitcode}", 128 - failure.exitcode
    return f"global rank {rank} (pid {failure.pid}) {how}", status


def _told_by(failure: ProcessFailure) -> str:
    """Return the error and its line in the script, if the worker has written its error file."""
    data = failure.error_file_data.get("message")
    if not isinstance(data, dict):
        return ""
    stack = str(data.get("extraInfo", {}).get("py_callstack", ""))
    found = failure_in(stack, start_folder())
    return f", {found or data.get('message', '')}"
