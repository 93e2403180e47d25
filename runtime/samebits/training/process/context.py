"""This process's membership in the job: the package's only global object, created by ``samebits.init()``.

In the scheduler's role, ``init()`` serves until the job is over and then ends the process. In a worker, it waits for a
seat, installs a process group of one rank, and observes how the process exits. The reason for any exit is reported to
the scheduler. SameBits' own errors are printed as one sentence, with their exit status, instead of a traceback.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import torch
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from samebits import config, strict_json
from samebits.config import Role, Settings
from samebits.core.messages import Admitted, GenerationStarted, RankPosition
from samebits.core.replacement_names import root_of
from samebits.errors import (
    DivergenceError,
    FencedError,
    HiddenStateError,
    LayoutError,
    SameBitsError,
    SettingsError,
    UnequalError,
    UntrainedError,
    UsageError,
)
from samebits.service import host, log, stacks
from samebits.service.agent import Agent
from samebits.service.alone import SchedulerThread
from samebits.service.copies.buddy import CopyListener
from samebits.service.health import host_sensor
from samebits.service.probe_beat import ProbeBeat
from samebits.service.scheduler_address import address_towards, addresses_of, wait_for_name
from samebits.service.scheduling.loop import SchedulerService
from samebits.service.torchrun_seat import become_keeper
from samebits.spelling import spelled_run
from samebits.start_folder import start_folder, was_started_in
from samebits.store.child_processes import die_with
from samebits.store.lock import DirectoryLock
from samebits.store.process_identity import host_id
from samebits.training import torch_private
from samebits.training.group import breaker, ddp, device, gloo, group, meshes
from samebits.training.group.calling_place import calling_place, place_of
from samebits.training.group.group import Group
from samebits.training.process import node_comparison, numerics, preflight
from samebits.training.process.compiled_code import keep_compiled_code
from samebits.training.process.device_view import DeviceView, wait_for_memory
from samebits.training.process.exit_status import ExitStatus, last_words, named, own_words, watch_threads
from samebits.training.process.next_group import NextGroup, join_plain_group, likely_place, own_info
from samebits.training.process.sigterm import Departure
from samebits.training.process.torchrun_calls import TorchrunCalls
from samebits.training.torch_private import not_tried

_TRAINED_ALONE = (
    "worker {node} trained alone: samebits.elastic.run was never called. Fix: write `@samebits.elastic.run` above the "
    "training function, as in `def train(state): ...`, and call train(state)"
)
_COLLECTIVE_FAILED = (
    "{place}: a collective after the function that elastic.run calls has failed: another rank is lost, and no recovery "
    "repeats it. Fix: move the collective into that function, or let one rank do it alone"
)

OWN_ERROR_GRACE_S = 0.3
"""Delay in seconds between an exception in the script, which is reported at once, and giving up the seat.

If the program is at fault, the other ranks reach the same error and report it themselves. Without the delay they would
be interrupted one step earlier and wait for a process that fails again.
"""
_FOLLOWS_S = 10.0  # longer than a process takes from its failure until torchrun sees its end
SETTLE_S = 1.0
"""Maximum wait of a fork for running collectives, since a collective may wait for a peer that waits for this process.
"""
DEVICES_FILE = "devices.lock"
"""The file in LOG_DIR that reserves accelerators (:func:`samebits.training.group.device.claim`)."""
VERDICT_S = 2.0  # how long a failed collective waits until the scheduler names the lost member


@dataclass(slots=True)
class Worker:
    """A worker process that has a seat."""

    settings: Settings
    job_name: str
    device: torch.device
    agent: Agent
    admitted: Admitted
    scheduler_addresses: frozenset[gloo.Address]  # resolved here, since a forked child may not look up names
    generation: GenerationStarted | None = None  # the current or last generation
    group: Group | None = None
    next_group: NextGroup | None = None  # begun early for the first generation
    copy_listener: CopyListener | None = None  # receives other ranks' points for its writer
    begins: dict[str, Callable[[GenerationStarted], object]] = field(default_factory=dict)
    """Callbacks by name, called when a generation's state is restored and training is about to begin."""
    has_trained: bool = False  # whether elastic.run was entered
    is_over: bool = False  # whether training has finished and this process has the final state
    is_left_out: bool = False  # whether training has finished while this process waited for its shard group
    ending: _Ending = field(default_factory=lambda: _Ending())
    departure: Departure = field(default_factory=Departure)
    device_view: DeviceView = field(init=False)

    def __post_init__(self) -> None:
        """Create the view of the device."""
        note = None
        if self.device.type != "cpu":
            path = _memory_note(self.settings, self.agent.node)
            note = DeviceView.noting(path, self.admitted.job, host_id(), self.device)
        self.device_view = _view(self.settings, self.device, note)

    @contextlib.contextmanager
    def trains(self) -> Iterator[None]:
        """Context manager for the training function, which records the exit status if the function ends the program."""
        try:
            yield
        except SystemExit as error:
            self.ending.exit_status.note(error.code)
            raise
        self.ending.is_through = True

    def end_unneeded_spare(self) -> None:
        """End this process if training is finished and it has no rank, because scripts save and print by rank.

        A process that waited for its shard group ends too, because it holds an older state, in groups that ended.
        """
        if self.is_over and self.admitted.slot is None:
            log.say("this spare was not needed: it exits without running the rest of the script")
        elif self.is_left_out:
            log.say(
                "training has finished without this worker, whose shard group was incomplete: it exits without running "
                "the rest of the script"
            )
        else:
            return
        self.ending.exit_status.note(0)
        sys.exit(0)

    def settle(self) -> None:
        """Wait for collectives in gloo's threads, up to a time limit."""
        if self.group is not None:
            self.group.settle(SETTLE_S)

    def let_go_in_child(self) -> None:
        """In a forked child (a DataLoader's worker), close connections whose end signals this process's death.

        The kernel ends a connection when its last descriptor is closed, and a child that outlives its parent has a copy
        of every descriptor. SIGTERM gets its previous handler back.
        """
        self.departure.let_go_in_child()
        endpoints = gloo.Endpoints()
        endpoints.peers |= self.scheduler_addresses
        if self.agent.scheduler_peer is not None:
            endpoints.peers.add(self.agent.scheduler_peer)
        if self.group is not None:
            endpoints.own |= self.group.endpoints.own
            endpoints.peers |= self.group.endpoints.peers
        gloo.close_copies(endpoints)

    def publish_place(self) -> None:
        """Set RANK, WORLD_SIZE and the LOCAL_ variables as torchrun does, or unset them in a spare."""
        if (place := self.generation) is not None:
            local_rank = device.local_rank(self.device, place.local_rank)
            config.publish_place(place.rank, local_rank, place.world_size, place.local_world_size)
        elif self.admitted.slot is None:
            config.withdraw_place()
        else:
            self._publish_seat()

    def _publish_seat(self) -> None:
        rank, world_size = self.seat
        local_rank = device.local_rank(self.device, _index(self.admitted.slot, self.agent.node))
        local_world_size = min(world_size, torch.accelerator.device_count() or world_size)
        config.publish_place(rank, local_rank, world_size, local_world_size)

    @contextlib.contextmanager
    def stands_in(self) -> Iterator[None]:
        """Context manager that sets a spare's rank variables to an unused rank, for libraries that need them."""
        self._publish_seat()
        try:
            yield
        finally:
            self.publish_place()

    @property
    def seat(self) -> tuple[int, int]:
        """The rank and world size of this seat.

        The rank of a spare is its node's number, or a number beyond all ranks.
        """
        slot, world_size = self.admitted.slot, self.admitted.world_size
        return max(world_size, _index(None, self.agent.node)) if slot is None else slot, world_size

    def take_seat_again(self) -> None:
        """Register under a new session after another node has taken this slot.

        This may wait like a newly started process.

        Raises:
            SameBitsError: no seat is left; the message gives the reason.
        """
        self.agent.leave(on_purpose=True, text="fenced", status=FencedError.exit_code)
        self.agent = self.ending.agent = Agent(self.settings, self.job_name, self.device.type)
        self.generation = None
        self.admitted = self.agent.register()
        self.publish_place()
        _say_seated(self.agent, self.admitted)
        self.watch_device()

    def watch_device(self) -> None:
        """Let the agent check the health of this process's device, if it is an accelerator."""
        if (watched := self.device_view.watched()) is not None:
            self.agent.watch_device(watched)

    def take_next_group(self, place: RankPosition) -> NextGroup:
        """Return the group for this place, and start to form it unless it was already started."""
        next_group, self.next_group = self.next_group, None
        ahead = meshes.groups_of(place.rank, place.world_size)
        if next_group is not None and next_group.place == place and not ahead:
            return next_group
        if next_group is not None:
            next_group.group.drop()
        return NextGroup(self.settings, self.device, place, own_info(self.agent, self.copy_listener), ahead)


_process: Worker | None = None


def init() -> None:
    """Take the role that the environment assigns to this process.

    With ``ROLE=worker``, wait for a seat and set RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE, which each
    generation sets again. The default process group contains only this process until :func:`samebits.elastic.run`
    replaces it. With ``ENABLE_RECOVERY=0`` there is no group, and all variables that
    ``torch.distributed.init_process_group()`` reads are set.

    With ``ROLE=scheduler``, serve until the job is over, then end the process: the call does not return.

    With torchrun's variables and without ROLE, become the keeper of this rank, which restarts the command as a worker
    (``service.torchrun_seat``).

    Without ROLE, WORKER_NUM, SCHED_*, NODE_ID and RANK, this process is a single-worker job that includes its
    scheduler. Commits, checkpoints and restarts work as in any job.

    Raises:
        SettingsError: the environment is wrong; the message lists all problems.
        SameBitsError: this process gets no seat; the message gives the reason.
    """
    global _process
    if _process is not None:
        return
    ending = _Ending()
    ending.install()
    _refuse_in_a_child()
    if (seat := config.torchrun_seat()) is not None:
        become_keeper(seat, start_folder())
    alone = config.alone()
    was_started_in(config.take_start_folder() if alone is None else None)
    settings, warnings = config.read() if alone is None else config.read(alone)
    settings = config.in_folder(start_folder(), settings)
    log.set_up("scheduler" if settings.role is Role.SCHEDULER else f"worker {settings.node_id or os.getpid()}")
    for warning in warnings:
        log.warn(warning)
    job_name = settings.job_name or Path(sys.argv[0]).name
    if settings.role is Role.SCHEDULER:
        _serve(settings, ending)
    if warning := not_tried(str(torch.__version__)):
        log.warn(warning)
    if alone is not None:
        ending.scheduler = SchedulerThread(replace(settings, job_name=job_name))
        settings = ending.scheduler.settings
        on_more = spelled_run(sys.argv if sys.argv[0] else ["train.py"])
        log.say(f"training with one worker, in this process; `{on_more}` trains with more")
    _process = _take_seat(settings, job_name, ending)


def _refuse_in_a_child() -> None:
    """Raise in a child of a worker, which would take that worker's seat because it inherits the environment.

    With spawn, and with forkserver, the default since Python 3.14, every child imports the script again and runs its
    top-level code.
    """
    parent = multiprocessing.parent_process()
    parents = {os.getppid()} if parent is None or parent.pid is None else {os.getppid(), parent.pid}
    if (worker := config.parent_worker(parents)) is not None:
        kind = "a process that multiprocessing started" if parent is not None else "a child process"
        raise UsageError(IN_A_CHILD.format(kind=kind, worker=worker))


IN_A_CHILD = (
    "samebits.init() was called in {kind}, a DataLoader's worker for example, and not in the worker itself (pid "
    "{worker}): it would take that worker's seat a second time. Fix: put the script's code into a function, and "
    'call that under `if __name__ == "__main__":`'
)


def _serve(settings: Settings, ending: _Ending) -> NoReturn:
    service = SchedulerService(settings)
    signal.signal(signal.SIGTERM, lambda *_: service.abandon())
    ended = service.serve()
    if ended.kind.exit_code:
        log.warn(ended.text)
    ending.quiet = True
    sys.exit(ended.kind.exit_code)


def _take_seat(settings: Settings, job_name: str, ending: _Ending) -> Worker:
    config.mark_worker()  # before any child can be started
    probe = ProbeBeat(settings.probe_file)
    host.raise_descriptor_limit()  # gloo aborts a process that has no descriptor left for any incoming connection
    numerics.settle_threads(settings.max_worker_num)
    kind = device.choose_device(settings.device, 0).type
    wait_for_name(settings)
    listener = None
    if settings.enable_recovery:
        listener = CopyListener(address_towards(settings.sched_host, settings.sched_port))
    preferred = device.choose_device(kind, _index(None, settings.node_id or ""))
    reserved = _reserve(settings, preferred)
    agent = Agent(settings, job_name, kind)
    alone, next_group = _prepare(settings, kind, own_info(agent, listener))
    ending.agent = agent
    stacks.report_crashes()
    stacks.open_channel()
    figures = None
    if settings.health.preflight:
        figures = preflight.require(settings, reserved or preferred)
    if host_sensor.may_refuse(settings):
        host_sensor.require(settings, _view(settings, reserved or preferred).watched())
    admitted = agent.register(meanwhile=_import_what_optimizers_need)
    _import_what_optimizers_need()  # if it has not run yet: better here than in the first optimizer
    chosen = reserved or device.choose_device(kind, _index(admitted.slot, agent.node))
    device.use(chosen)
    _say_seated(agent, admitted)
    if chosen.type != "cpu":
        wait_for_memory(_memory_note(settings, agent.node), admitted.job, host_id(), chosen)
    probe.ready()
    keep_compiled_code(settings, chosen, prunes=admitted.slot == 0)
    addresses = addresses_of(settings.sched_host, settings.sched_port)
    if figures is not None and settings.enable_recovery:
        if alone is not None:
            alone.drop()  # a pair's group must be torch's default while the pair computes sums
            alone = None
        node_comparison.compare(settings, agent, admitted, chosen, figures)
    process = Worker(settings, job_name, chosen, agent, admitted, addresses, ending=ending)
    process.next_group, process.copy_listener = next_group, listener
    process.watch_device()
    ending.recovers = settings.enable_recovery
    if settings.enable_recovery:
        ending.departure = process.departure
        process.departure.install()
        process.group = alone or group.form_alone(
            chosen,
            address=host.loopback(),
            alone=side_of_training,
            backend=settings.collective_backend,
        )
        process.publish_place()
        TorchrunCalls(lambda: None if process.generation else process.seat, is_spare).install()
    else:
        process.generation = join_plain_group(agent, settings, chosen)
    Forking(process.settle, process.let_go_in_child).install()
    return process


def _view(settings: Settings, chosen: torch.device, note: Callable[[int], None] | None = None) -> DeviceView:
    return DeviceView(chosen, settings.health.every_s, config.visible_devices("npu"), note=note)


def _reserve(settings: Settings, preferred: torch.device) -> torch.device | None:
    """Reserve a device before this process asks for a seat, so that no member is without a device."""
    if preferred.type == "cpu":
        return None
    backend = device.backend_of(preferred, settings.collective_backend)
    node = settings.node_id or ""
    return device.claim(preferred, settings.log_dir / DEVICES_FILE, host_id(), backend, refuses=root_of(node) == node)


def _memory_note(settings: Settings, node: str) -> Path:
    """Return the path where a node and its replacements record how much device memory they use."""
    return settings.log_dir / f"memory_{root_of(node)}.json"


def _say_seated(agent: Agent, admitted: Admitted) -> None:
    log.set_up(f"{'spare' if admitted.slot is None else 'worker'} {agent.node}")
    seat = "a spare" if admitted.slot is None else f"slot {admitted.slot} of {admitted.world_size}"
    log.say(f"seated: {seat}, start {admitted.incarnation}, job {admitted.job}")


def _prepare(settings: Settings, kind: str, info: bytes) -> tuple[Group | None, NextGroup | None]:
    """Do everything that needs no seat before asking for one, because other ranks may wait afterwards."""
    if not settings.enable_recovery:
        return None, None
    ddp.install()
    # Both are slow the first time: filelock inspects its own signature, torch probes the processor.
    DirectoryLock(settings.recovery_path, "worker")
    if kind != "cpu":
        return None, None
    cpu = torch.device(kind)
    numerics.describe(cpu)
    place = likely_place(settings)
    next_group = None if place is None else NextGroup(settings, cpu, place, info)
    return group.form_alone(cpu, address=host.loopback(), alone=side_of_training), next_group


def _import_what_optimizers_need() -> None:
    """Import torch._dynamo while waiting for a seat; the first optimizer needs it, and importing it takes a second.

    Garbage collection is disabled during the import: it would scan the imported modules repeatedly, for a quarter of
    the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        importlib.import_module("torch._dynamo")
    finally:
        if was_enabled:
            gc.enable()


def current(call: str) -> Worker:
    """Return this process's worker; raise :class:`UsageError` if ``samebits.init()`` was not called before ``call``."""
    if _process is None:
        raise UsageError(f"{call} was called before samebits.init(). Fix: call samebits.init() first")
    return _process


def side_of_training() -> str:
    """Return ``after`` if training has finished, otherwise ``before``, for messages about calls outside training."""
    return "after" if _process is not None and _process.is_over else "before"


def get_rank() -> int:
    """Return this process's rank.

    The rank can change with every generation. Before the first generation, it is the rank that this process will have.

    Raises:
        UsageError: in a spare that has not replaced a lost worker, or before :func:`init`.
    """
    process = current("samebits.get_rank()")
    if process.generation is not None:
        return process.generation.rank
    if process.admitted.slot is None:
        raise UsageError(
            f"{calling_place()}: samebits.get_rank() was called in a spare, which has no rank yet. Fix: call it "
            "inside the function that elastic.run calls, or check samebits.is_spare() first"
        )
    return process.admitted.slot


def get_world_size() -> int:
    """Return the number of workers in this generation; before the first one, in the job.

    Raises:
        UsageError: before :func:`init`.
    """
    process = current("samebits.get_world_size()")
    return process.generation.world_size if process.generation is not None else process.admitted.world_size


def get_local_rank() -> int:
    """Return this process's index among its host's workers.

    On an accelerator, it is the index of this process's device instead, which never changes. On a CPU, the index
    assumes a single host before the first generation.
    """
    process = current("samebits.get_local_rank()")
    if process.generation is not None:
        return device.local_rank(process.device, process.generation.local_rank)
    return device.local_rank(process.device, _index(process.admitted.slot, process.agent.node))


def is_spare() -> bool:
    """Return whether this process is a spare that waits to replace a lost worker.

    Raises:
        UsageError: before :func:`init`.
    """
    process = current("samebits.is_spare()")
    return process.generation is None and process.admitted.slot is None


def _index(slot: int | None, node: str) -> int:
    """Return a process's index on its host, assuming a single host. Its device is this index modulo the device count.

    A spare's index is its node's number. A replacement's index is that of the node that it replaces.
    """
    first = root_of(node)
    if slot is not None and first == node:
        return slot
    return int(first) if first.isdecimal() else 0


_OWN_ERRORS = (UsageError, HiddenStateError, LayoutError, DivergenceError, UnequalError, SettingsError)
"""Errors of this package that end a rank by itself; other errors follow from the scheduler's decisions."""


def _record_for_torchrun(error: BaseException, traceback: TracebackType | None, *, is_first: bool) -> None:
    """Write the error where torchrun looks for the first cause, as torch's ``@record`` does.

    torchrun considers the error with the earliest time the first cause. A process that ends because another has failed
    may end before it, and a process that ends with ``sys.exit(3)`` has no file, only the time at which torchrun sees
    its end. So the file of an error that is not the first cause gets a later time.
    """
    try:
        raise error.with_traceback(traceback)
    except BaseException:  # torch formats the traceback of the exception being handled
        get_error_handler().record_exception(error)
    path = config.torchrun_error_file()
    if path is None or is_first:
        return
    with contextlib.suppress(OSError, ValueError):
        data = strict_json.loads(path.read_text())
        data["message"]["extraInfo"]["timestamp"] = str(int(time.time() + _FOLLOWS_S))
        path.write_text(strict_json.dumps(data))


class _Ending:
    """Determines how this process has ended, and reports it to the scheduler.

    Status 0 counts as an intended end. After a ``raise SystemExit``, the status is unknown. It counts as 0 if training
    has finished, or with ``ENABLE_RECOVERY=0``, where a script may train in its own way. Otherwise, the worker counts
    as failed.

    Attributes:
        agent: reports the end; None until a seat is requested.
        scheduler: the scheduler, if it is a thread of this process.
        recovers: whether recovery is on.
        is_through: whether the training function has returned, or did not need to be called.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._exit_now: Callable[[int], NoReturn] = os._exit
        self.agent: Agent | None = None
        self.scheduler: SchedulerThread | None = None
        self.quiet = False
        self.departure = Departure()
        self.exit_status = ExitStatus()
        self.recovers = True
        self.is_through = False
        self._error: BaseException | None = None
        self._words = ""  # describes the error
        self._status = 0
        self._is_status_known = True
        self._has_left = False

    def install(self) -> None:
        """Observe all ways in which the interpreter can end: an uncaught exception, an exit, the end of the program."""
        self._previous_hook = sys.excepthook
        sys.excepthook = self._uncaught
        watch_threads(self._thread_ended)
        self.exit_status.install()
        atexit.register(self._at_end)
        vars(os)["_exit"] = self._exit_at_once

    def _uncaught(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if threading.current_thread() is not threading.main_thread():
            self._previous_hook(kind, error, traceback)  # a custom thread hook may call this one
            return
        if self.agent is not None and group.is_communication_failure(error):
            # Outside elastic.run: name the lost rank, which the closed socket does not.
            verdict = self.agent.verdict(VERDICT_S)
            if self.recovers and self.is_through:
                error = UsageError(_COLLECTIVE_FAILED.format(place=place_of(error)))
            else:
                error = verdict or error
        if UsageError.exit_code in torch_private.statuses_of_loader(traceback):
            error = UsageError(IN_A_CHILD.format(kind="a process that multiprocessing started", worker=os.getpid()))
        self._error = error
        is_own = isinstance(error, _OWN_ERRORS) and (self.agent is None or error is not self.agent.must_end)
        is_told_to = isinstance(error, SameBitsError) and not is_own
        if self.agent is not None and not is_told_to:
            if isinstance(error, SameBitsError) and not self.is_through:
                self._words = own_words(error, place_of(error))
                self.agent.speak_last(self._words, error.exit_code)
            else:
                self._words = last_words(kind, error, traceback)
                self.agent.speak_last(self._words)  # before anything slow, such as a traceback
        if isinstance(error, SameBitsError):
            for line in str(error).splitlines():
                print(f"samebits: {line}", file=sys.stderr, flush=True)
            self._status = error.exit_code
        else:
            self._previous_hook(kind, error, traceback)
            self._status = 1
        if config.torchrun_error_file() is not None:
            _record_for_torchrun(error, traceback, is_first=not is_told_to)
        if self.agent is not None and not is_told_to and _process is not None and _process.has_trained:
            self.agent.verdict(OWN_ERROR_GRACE_S)

    def _exit_at_once(self, status: int) -> NoReturn:
        """Replacement for ``os._exit``, which skips ``atexit`` functions; reports the exit status first."""
        is_main = os.getpid() == self._pid and threading.current_thread() is threading.main_thread()
        if is_main and self.agent is not None and not self._has_left:
            has_done_its_part = status == 0 and (self.is_through or not self.recovers)
            self._leave(on_purpose=has_done_its_part, text=f"its program ended with os._exit({status})", status=status)
        self._exit_now(status)

    def _leave(self, *, on_purpose: bool, text: str, status: int | None) -> None:
        assert self.agent is not None
        self._has_left = True
        self.agent.leave(on_purpose=on_purpose, text=text, status=status)

    def _thread_ended(self, text: str) -> None:
        if self.agent is not None:
            self.agent.report_anomaly(self.agent.step, text)

    def _at_end(self) -> None:
        text = self._judge() if self._error is None else self._words or named(self._error)
        if self.agent is not None:
            told_to = self._error is not None and (
                self._error is self.agent.must_end
                or (isinstance(self._error, _OWN_ERRORS) and self.agent.must_end is not None)  # that ended the job
            )
            if self.departure.has_left:
                text = "it was asked to (SIGTERM)"
            on_purpose = told_to or self.departure.has_left or (self._status == 0 and self._error is None)
            if self._error is None and not on_purpose:
                self.agent.speak_last(text)
            elif self._error is None and self._trained_alone():
                self._status, text = UntrainedError.exit_code, "its script never called samebits.elastic.run"
                print(f"samebits: {_TRAINED_ALONE.format(node=self.agent.node)}", file=sys.stderr, flush=True)
            status = self._status if self._is_status_known else None
            self._leave(on_purpose=on_purpose, text="told to end" if told_to else text, status=status)
            if self.scheduler is not None:
                self.scheduler.close(is_over=on_purpose and self.is_through)
        if _process is not None and _process.next_group is not None:
            _process.next_group.group.breaker.throw("the process ends")  # its thread waits for a generation
        breaker.leave_with(self._status)
        if isinstance(self._error, SameBitsError) or self._status == UntrainedError.exit_code:
            # Python would exit with 1 after an uncaught exception and 0 otherwise; this status is more specific.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self._status)

    def _trained_alone(self) -> bool:
        """Return whether the program has ended without running the job's training."""
        process = _process
        if process is None or not self.recovers or self.is_through or self.departure.has_left:
            return False
        return process.admitted.finished is None

    def _judge(self) -> str:
        """Set the status of a program that has ended without an error, and return a description."""
        found = self.exit_status.find()
        if found == 0 and self.recovers and _process is not None and _process.has_trained and not self.is_through:
            self._status = UntrainedError.exit_code
            return "its program ended with status 0 inside samebits.elastic.run: return from the function instead"
        if found is not None:
            self._status = found
            return f"its program ended with status {found}"
        self._is_status_known = False
        self._status = 1 if self.recovers and not self.is_through else 0
        when = "after" if self.is_through else "before"
        return f"its program ended with a SystemExit {when} training had finished; sys.exit() would report the status"


# ---- forks, such as those of a DataLoader's workers
#
# A forked child has one thread but the locks of all threads. A lock that another thread held at the fork stays held in
# the child forever, so the child may block before its first line runs. Code in the child, such as a check for its
# parent, cannot help then.
#
# - glibc reinitializes most of its own locks in a child, but not the lock of atexit(3) (``__exit_funcs_lock``, glibc
#   2.36). torch takes that lock whenever an operator is used for the first time, so gloo's threads take it in their
#   first collectives. A DataLoader's worker takes it in its first call (``torch.set_num_threads``). So a fork waits
#   until no collective is running.
# - The kernel ends a multiprocessing child that should end with its parent (``daemon``, prctl(2), ``PR_SET_PDEATHSIG``)
#   if the parent cannot do so because it was killed or the child no longer responds.


class Forking:
    """Handles forks of this process after ``install()``.

    Args:
        settle: waits, for a bounded time, until this process's other threads hold no lock that a child would need.
        let_go: called in each child.
    """

    def __init__(self, settle: Callable[[], object], let_go: Callable[[], object]) -> None:
        self._settle = settle
        self._let_go = let_go
        self._pid = os.getpid()
        self._main_thread = threading.main_thread().ident  # the same number in a forked child

    def install(self) -> None:
        """Handle every fork made through Python, except ``subprocess``, which executes another program at once."""
        os.register_at_fork(before=self._before, after_in_child=self._let_go)
        multiprocessing.util.register_after_fork(self, Forking._begin)

    def _before(self) -> None:
        if os.getpid() == self._pid:  # a child has none of the parent's other threads
            self._settle()

    def _begin(self) -> None:
        """Make the kernel end a multiprocessing child with its parent, before the child does its own work."""
        parent = multiprocessing.parent_process()
        if not multiprocessing.current_process().daemon or threading.get_ident() != self._main_thread:
            return
        if parent is not None and parent.pid is not None:
            die_with(parent.pid)
