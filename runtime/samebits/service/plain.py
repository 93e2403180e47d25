"""Run a script that does not use SameBits (plain mode), in a process that holds its seat.

This launcher of one worker registers, starts the script with torchrun's environment (RANK, LOCAL_RANK, WORLD_SIZE,
MASTER_ADDR, MASTER_PORT), and restarts it in the next generation when a member is lost. Losses are handled as for every
worker (spares, cool-down, journal, first cause), but the script's own checkpoint decides where it resumes.

The script and the launcher never outlive each other: if a signal kills the script, the launcher dies from the same
signal, and the kernel kills the script when its launcher dies (prctl(2), PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from samebits import config
from samebits.config import Role, Settings
from samebits.core.messages import GenerationStarted, Holdings
from samebits.core.point import Point
from samebits.core.reports import FINAL, Digest
from samebits.errors import GenerationEndedError, SameBitsError, SettingsError
from samebits.net.address import free_port
from samebits.service import log
from samebits.service.agent import Agent
from samebits.service.scheduler_address import address_towards
from samebits.store.child_processes import tied
from samebits.store.process_identity import ProcessIdentity

LOOK_S = 0.5  # how often to check for changes that no descriptor reports: members that join or leave
BLAME_S = 5.0  # how long to wait, after a script failed, for news that another rank's death was the reason
LEFT_STATUS = 143
_FINISHED = b"plain"
_OF_THE_LAUNCHER = ("ROLE", "NODE_ID", "MS_ROLE", "MS_NODE_ID")


class PlainRun:
    """One run of the script in its own session."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            tied(words), env=dict(environment), stdin=subprocess.DEVNULL, start_new_session=True
        )
        self._identity = ProcessIdentity.of_child(self._process.pid)
        self._descriptor = os.pidfd_open(self._process.pid)

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when the script has ended."""
        return self._descriptor

    def status(self) -> int | None:
        """Return the script's status as in subprocess: negative for a signal, None while it runs."""
        return self._process.poll()

    def end(self, grace_s: float) -> None:
        """End the script and all processes of its session: SIGTERM, then SIGKILL after ``grace_s``."""
        for number, patience_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, None)):
            if self._process.poll() is None:
                os.killpg(self._process.pid, number)  # not reaped yet, so the pid is not reused
                try:
                    self._process.wait(patience_s)
                except subprocess.TimeoutExpired:
                    continue
        os.close(self._descriptor)


class Launcher:
    """The process of a worker in plain mode.

    Args:
        settings: role worker.
        words: the script's command.
    """

    def __init__(self, settings: Settings, words: Sequence[str]) -> None:
        self._settings = settings
        self._words = words
        self._agent = Agent(settings, settings.job_name or Path(words[0]).name, settings.device or "cpu")
        self._readable, self._writable = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._is_asked_to_leave = False

    def run(self) -> int:
        """Hold the seat until the job is over; return the exit status.

        Raises:
            SameBitsError: the process no longer has a place in the job.
        """
        self._agent.on_break = lambda _reason: self._wake()
        signal.signal(signal.SIGTERM, self._take_sigterm)
        try:
            admitted = self._agent.register()
            log.set_up(f"{'spare' if admitted.slot is None else 'worker'} {self._agent.node}")
            seat = "a spare" if admitted.slot is None else f"slot {admitted.slot} of {admitted.world_size}"
            log.say(f"seated: {seat}, start {admitted.incarnation}, job {admitted.job}; a plain script")
            status = self._hold_seat()
        except SameBitsError as error:
            self._agent.leave(on_purpose=error is self._agent.must_end, text=str(error), status=error.exit_code)
            raise
        text = "it was asked to (SIGTERM)" if self._is_asked_to_leave else f"its script ended with status {status}"
        if status < 0:
            self._die_of(-status)
        if status and not self._is_asked_to_leave:
            self._agent.speak_last(text)
        self._agent.leave(on_purpose=status == 0 or self._is_asked_to_leave, text=text, status=status)
        return status

    def _hold_seat(self) -> int:
        while not self._is_asked_to_leave:
            place = self._agent.enter(Holdings((), own_parts=False, numerics=()))
            if not isinstance(place, GenerationStarted):
                return 0  # the job finished while this process was away
            try:
                status = self._run_generation(place)
            except GenerationEndedError as ended:
                log.say(f"generation {place.generation} is over: {ended}")
                continue
            if status is not None:
                return status
        return LEFT_STATUS

    def _run_generation(self, place: GenerationStarted) -> int | None:
        """Run the script once, and return its status, or None if this process has to leave.

        Raises:
            GenerationEndedError: a member was lost, and the script was ended so that it can be restarted.
        """
        agent = self._agent
        agent.publish(place.generation, self._store_address().encode() if place.rank == 0 else b"")
        host, _, port = bytes(agent.address_map(place.generation)[0]).decode().rpartition(":")
        script = PlainRun(self._words, self._environment(place, host, port))
        log.say(
            f"generation {place.generation}: the script begins as rank {place.rank} of {place.world_size}, "
            f"MASTER_ADDR={host}, MASTER_PORT={port}"
        )
        try:
            agent.trains(place.generation)
            status = self._until_it_ends(script)
        finally:
            script.end(self._settings.grace.shutdown_s / 2)
        if status == 0 and self._settings.enable_recovery:
            point = Point(1, place.generation)
            agent.complete(place.generation, point.step, [Digest(point, FINAL, _FINISHED)])
        return status

    def _until_it_ends(self, script: PlainRun) -> int | None:
        """Return the script's status, or None if this process has to leave first."""
        poll = select.poll()
        poll.register(script.fileno(), select.POLLIN)
        poll.register(self._readable, select.POLLIN)
        blame_until: float | None = None
        while not self._is_asked_to_leave:
            self._agent.check()
            status = script.status()
            if status is not None and (status <= 0 or (blame_until is not None and blame_until <= time.monotonic())):
                return status
            if status is not None and blame_until is None:
                # The reason may be another rank's death, which becomes known a moment later.
                blame_until = time.monotonic() + BLAME_S
                poll.unregister(script.fileno())
            poll.poll(LOOK_S * 1000)
            try:
                os.read(self._readable, 4096)
            except BlockingIOError:
                continue
        return None

    def _environment(self, place: GenerationStarted, host: str, port: str) -> dict[str, str]:
        """Return this process's environment with torchrun's variables added."""
        environment = config.whole_environment()
        for name in _OF_THE_LAUNCHER:
            environment.pop(name, None)
        seats = (place.rank, place.local_rank, place.world_size, place.local_world_size)
        config.publish_place(*seats, environ=environment)
        if self._settings.max_worker_num > 1:
            config.default_to_one_thread(environment)  # as torchrun does
        count = str(place.generation - 1)
        return {
            **environment,
            "MASTER_ADDR": host,
            "MASTER_PORT": port,
            "GROUP_RANK": "0",
            "ROLE_RANK": str(place.rank),
            "ROLE_WORLD_SIZE": str(place.world_size),
            "TORCHELASTIC_RESTART_COUNT": count,
            "TORCHELASTIC_RUN_ID": self._settings.job_name or "samebits",
        }

    def _store_address(self) -> str:
        """Return an address for rank 0's store, with a new free port in each generation."""
        host = address_towards(self._settings.sched_host, self._settings.sched_port)
        return f"{host}:{free_port([host])}"

    def _wake(self) -> None:
        try:
            os.write(self._writable, b"b")
        except BlockingIOError:
            return  # it is already awake

    def _take_sigterm(self, *_: object) -> None:
        self._is_asked_to_leave = True
        self._wake()

    def _die_of(self, number: int) -> None:
        """End this process with the signal that ended the script, so that observers see the same cause."""
        log.say(f"the script was killed by signal {number}; this process ends the same way")
        signal.signal(number, signal.SIG_DFL) if number not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), number)
        signal.pause()


def main(words: Sequence[str]) -> int:
    """Run the launcher of one worker with this command. The environment contains its settings."""
    settings, warnings = config.read()
    if settings.role is not Role.WORKER:
        raise SettingsError(["ROLE: this command holds a worker's seat. Fix: call `samebits run --plain`"])
    log.set_up(f"worker {settings.node_id or os.getpid()}")
    for warning in warnings:
        log.warn(warning)
    return Launcher(settings, words).run()
