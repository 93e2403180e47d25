"""Run a scheduler in a thread of the job's only process, for ``python train.py`` without settings.

A world of size one has the same features (journal, commits, checkpoints, restart from the newest point) because it runs
the same service. The scheduler listens on a free loopback port and accepts only a secret that is generated at start, so
only this process can connect.
"""

from __future__ import annotations

import os
import secrets
import threading
from dataclasses import replace
from pathlib import Path

from samebits.config import Role, Settings
from samebits.core.ready import JobEnded
from samebits.errors import ListenError, SameBitsError, StoreError
from samebits.net.address import free_port, loopback
from samebits.service import log
from samebits.service.scheduling.loop import SchedulerService
from samebits.service.status import stored_view
from samebits.store.durable import move_aside

END_S = 5.0  # for writing the journal's last record
_TRIES = 3  # another process may bind the free port meanwhile


class SchedulerThread:
    """The scheduler of a job with a single process, run in a thread.

    Args:
        settings: the worker's settings.

    Attributes:
        settings: the same settings, with the port and the secret.

    Raises:
        SameBitsError: the scheduler cannot serve, for example because RECOVERY_PATH is in use or belongs to another
            job.
    """

    def __init__(self, settings: Settings) -> None:
        _make_way(settings)
        for last in (*[False] * (_TRIES - 1), True):
            self.settings = replace(
                settings,
                sched_host=loopback(),
                relay=None,
                sched_bind=None,
                sched_port=free_port([loopback()]),
                cluster_secret=secrets.token_hex(32),
                cluster_secret_file=None,
            )
            try:
                self._begin()
            except ListenError:
                if last:
                    raise
            else:
                break
        os.register_at_fork(after_in_child=self._service.let_go_in_child)

    def _begin(self) -> None:
        self._error: BaseException | None = None
        self._ended: JobEnded | None = None
        self._known = threading.Event()  # set once the service is ready or has failed
        self._service = SchedulerService(
            replace(self.settings, role=Role.SCHEDULER), on_ready=self._known.set, is_guest=True
        )
        self._thread = threading.Thread(target=self._serve, name="samebits-scheduler", daemon=True)
        self._thread.start()
        self._known.wait()
        if self._error is not None:
            raise self._error

    def _serve(self) -> None:
        log.hush()
        try:
            self._ended = self._service.serve()
        except SameBitsError as error:
            self._error = error
        finally:
            self._known.set()

    def close(self, *, is_over: bool) -> None:
        """Stop the scheduler.

        If ``is_over``, the worker has left and the job may finish first; otherwise, the job can be resumed.
        """
        if is_over:
            self._thread.join(END_S)
        self._service.abandon()
        self._thread.join(END_S)


def _make_way(settings: Settings) -> None:
    """Move a finished job's folders aside, as every start of a new job does.

    Raises:
        StoreError: the job's checkpoints are in an object store, where nothing can be moved.
    """
    stored = stored_view(settings.recovery_path) if settings.enable_recovery else None
    if stored is None or not stored.job_finished:
        return
    if not isinstance(settings.checkpoint_path, Path):
        raise StoreError(
            f"CHECKPOINT_PATH={settings.checkpoint_path} belongs to job {stored.job}, which is finished, and "
            "checkpoints in an object store are not moved aside. Fix: export another CHECKPOINT_PATH for the next job"
        )
    for path in (settings.recovery_path, settings.checkpoint_path):
        aside = move_aside(path, stored.job)
        if aside is not None:
            log.say(f"job {stored.job} is finished; its folder {path} is moved aside, to {aside.name}")
