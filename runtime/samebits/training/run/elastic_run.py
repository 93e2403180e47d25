"""Run one call of a training function under ``elastic.run``, through all its generations.

For each generation, this process waits in the rendezvous, forms the group, loads the restore point and calls the
function. When a member is lost, this rank leaves its current collective, returns to the last commit and starts over. A
survivor's memory holds the last commit, so a recovery sends state only to ranks that lack it, and reads disks only if
it is in no rank's memory.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from samebits.core.agent.agent_events import EnterAgain
from samebits.core.messages import MAX_END_CHARS, GenerationStarted, Holdings, RankPosition, Sharding
from samebits.core.point import Point
from samebits.core.reports import Progress
from samebits.errors import (
    DeviceLostError,
    DuplicateNodeError,
    FencedError,
    GenerationEndedError,
    HiddenStateError,
    HostsUpdatedInterrupt,
    LayoutError,
    RefusedError,
    UnequalError,
    UsageError,
)
from samebits.printable import IN_LOGS, shortened
from samebits.service import log
from samebits.store import checkpoint as checkpoints
from samebits.store.step_record import LogHeader
from samebits.training import torch_private
from samebits.training.checkpoint.replay import Replay, require_steps
from samebits.training.checkpoint.state_points import StatePoints
from samebits.training.group import ddp, group, meshes, recorder, transfer
from samebits.training.group import device as devices
from samebits.training.group.calling_place import calling_place
from samebits.training.main_thread_time import main_thread
from samebits.training.process import numerics
from samebits.training.process.context import Worker
from samebits.training.process.next_group import MemberInfo, NextGroups
from samebits.training.process.sigterm import SigtermStage
from samebits.training.run import process_tuning, stuck_collective
from samebits.training.run.gradient_audits import Audits
from samebits.training.run.main_thread_probe import MainThreadProbe
from samebits.training.run.process_tuning import InterpreterTuning, warm_up
from samebits.training.run.retaken_steps import Ranks, RetakenSteps
from samebits.training.run.step_times import StepTimes
from samebits.training.state.base_state import State
from samebits.training.state.checkpoint_config import StepLog
from samebits.training.state.script.loop_habits import last_batch
from samebits.training.state.virtual_workers import require_collective_allowed, took_batch

UNCOMMITTED_AT = 100
_LOOK_S = 0.1
_FIRST_STEP_S = 60.0
_TIMES_LONGEST_STEP = 2.0
_SETTLED_AT = 3
"""Number of commits after which a step's objects exist and the slow first steps are over."""

Result = TypeVar("Result")


class ElasticRun:
    """One call of ``elastic.run`` in one process: a worker, or a spare that may become a worker at any moment."""

    recovers = True

    def __init__(self, process: Worker, state: State, retaken: RetakenSteps | None = None) -> None:
        self._process = process
        self._retaken = retaken
        self._formed: group.Group | None = None  # the current generation's group
        self._agent = process.agent
        self._state = state
        self._points = StatePoints(process, state)
        self._live: Point | None = None  # the commit this process holds while it waits
        self._back_to: Point | None = None  # the point this process returned to because a round required it
        self._failed_with = ""  # the SameBits error that ended the last generation in this process
        self._is_new = True  # no generation has begun in this process
        self._tuning = InterpreterTuning()
        self._next_groups = NextGroups(process.take_next_group)
        self._step_log = StepLog.of(state.checkpoint_config.step_log)
        self._replay: Replay | None = None
        self._audits = Audits(process, state, lambda step: self._points.folder.saved_by(step))
        self._comparison: Callable[[], None] | None = None  # compares the state that this generation began with
        self._commits = 0  # commits of this process
        self._longest_step_s, self._committed_s = 0.0, 0.0  # this generation's longest step; time of its last commit
        self._uncommitted = 0  # optimizer steps since the last commit
        self._settled: int | None = None  # launches in this generation when the device was last waited for
        self._settled_s = 0.0  # time of that wait
        self._has_replicas = False  # whether this rank's shards have replicas
        measures = process.settings.straggler.policy != "off"
        self._step_times = StepTimes(process.settings.heartbeat_interval_s if measures else None)
        torch_private.follow_batches(_took_batch)
        if self._step_log is not None:
            require_steps(state)
        if process.admitted.slot is None:
            warm_up(state, process.device, process.group)
        self._take_seat()
        meshes.require_world(process.settings.min_worker_num, process.settings.max_worker_num)

    def run(self, call: Callable[[], Result]) -> Result | None:
        """Call the function until it returns in a generation that completes.

        If that fails, save this process's last commit to disk before raising the error.
        """
        while True:
            try:
                return self._run(call)
            except FencedError as error:
                if not error.may_return or self._state.shards():  # its shards belong to the old rank
                    raise
                reason = str(error)
            except (DuplicateNodeError, RefusedError):
                raise  # another process owns the folder
            except DeviceLostError:
                raise  # nothing can be copied from the device
            except UnequalError:
                raise  # no rank may continue from this rank's last commit
            except BaseException:
                self._points.save_last_commit(leaves=self._process.departure.has_left)
                raise
            self._come_back(reason)

    def _run(self, call: Callable[[], Result]) -> Result | None:
        self._process.departure.stage = SigtermStage.TRAINING
        while True:
            lost = None
            try:
                generation = self._enter()
                if isinstance(generation, Point):
                    self._end_outside(generation)
                    return None
                self._begin(generation)
                result = call() if self._retaken is None else self._call_again_where_needed(self._retaken, call)
                self._finish(generation)
                self._process.departure.obey()
                return result
            except Exception as error:
                if not group.is_communication_failure(error):
                    self._process.departure.obey_behind(error)
                    raise
                is_own = type(error) is GenerationEndedError and not self._agent.interrupted
                self._failed_with = str(error) if is_own else ""
                lost = str(error) if type(error) is GenerationEndedError else f"a collective failed: {_in_short(error)}"
                gently = isinstance(error, HostsUpdatedInterrupt)
            self._leave(lost, gently)  # outside the handler, so that the traceback keeps no objects alive

    def _end_outside(self, final: Point) -> None:
        """Handle the end of a training whose last generation this process was not a member of."""
        process = self._process
        process.is_over = True
        if self._points.generation is not None and self._state.shards():
            process.is_left_out = True
            self._points.discard_memory()
        elif process.admitted.slot is not None:  # a spare's script ends here
            self._points.load_final(final)

    def close(self) -> None:
        """Clean up after the function has returned or failed for good."""
        self._process.departure.stage = SigtermStage.OUTSIDE
        ddp.generation_ended()
        self._audits.close()
        self._tuning.end()
        generation = self._points.generation
        self._state.bind(None, 0 if generation is None else generation.rank)
        self._points.release()
        if self._replay is not None:
            self._replay.close()

    # ---- the state's commits

    def before_step(self) -> None:
        """Do what a step requires from all ranks, while a failure still leaves this rank at its last commit.

        On an accelerator, a collective is only queued when its call returns. If it were abandoned after the step was
        queued behind it, the step would use gradients that were not reduced, and this rank would commit the result.
        """
        if devices.is_capturing(self._process.device):
            raise UsageError(
                "optimizer.step() was captured into a CUDA graph: a replay would step even if a lost peer has left its "
                "collective without a result. Fix: capture only the module's forward and backward "
                "(torch.cuda.make_graphed_callables, before DistributedDataParallel), and step outside the graph"
            )
        self._uncommitted += 1
        if self._uncommitted == UNCOMMITTED_AT:
            log.warn(
                f"{UNCOMMITTED_AT} optimizer steps and no state.commit(): a loss now would undo all of them. Fix: call "
                "state.commit() after every optimizer.step()"
            )
        self._require_equal()
        self._points.require_shards_at_rest()
        ddp.sync_buffers_all()
        ddp.settle_all()
        is_finite = self._points.wait_for_gradients() if self._has_replicas else True
        self._settle()
        self._points.compare_if_not_finite(shards_are_finite=is_finite)
        self._points.finish_copy()
        self._audits.before_step()
        if self._replay is not None and not self._is_again:
            self._replay.before_step()

    def save(self) -> None:
        """Remember the current state as a commit, and save it if a save is due."""
        self._compare_passes()
        self._step_times.commit_begins()
        self._state.require_no_anomaly()
        self._require_equal()
        generation, points, state = self._points.present(), self._points, self._state
        step = state.completed_steps
        ddp.sync_buffers_all()  # in case a forward pass followed the step
        layouts = ddp.settle_all()
        self._settle()
        points.commits += 1
        self._commits += 1
        self._agent.commits += 1
        now_s = time.monotonic()
        if self._committed_s:
            self._longest_step_s = max(self._longest_step_s, now_s - self._committed_s)
        self._committed_s = now_s
        if self._retaken is not None:
            self._retaken.committed(points.commits, self._ranks())
            if self._retaken.is_over:
                self._retaken = None
        if self._commits == _SETTLED_AT:
            process_tuning.gather_aside()
        state.remember(Point(step, generation.generation))
        points.keep_generators(Point(step, generation.generation))
        if layouts is None:
            state.forget()
        else:
            points.layouts = layouts
            points.copy_shard(step)
        self._agent.step = step
        if self._replay is not None:
            self._replay.committed(step)
        if self._is_save_due(step):  # called on every rank, even if its disk fails
            began_s = time.monotonic()
            state.look_before_save()
            with points.due.saving():
                points.save(step)
            state.was_saved()
            self._agent.stalled_s += time.monotonic() - began_s
        else:
            points.leave_out(step)
        self._agent.pace = self._step_times.commit_ends(step)
        self._process.device_view.committed()

    def _is_save_due(self, step: int) -> bool:
        if self._retaken is not None and self._retaken.has_own_saves:
            return self._retaken.saves(self._points.commits)
        return self._points.due.is_at(step)

    # ---- steps that are taken twice to find hidden state

    @property
    def _is_again(self) -> bool:
        return self._retaken is not None and self._retaken.is_under_way

    def _compare_passes(self) -> None:
        """Compare this run of a step with an earlier run of it, if the step is to be repeated for comparison.

        Raises:
            TakeStepAgain: the step must be taken once more.
            HiddenStateError: the results differ.
        """
        retaken = self._retaken
        if retaken is not None:
            self._compare(retaken, lambda ranks: retaken.compare(self._points.commits + 1, ranks))

    def _call_again_where_needed(self, retaken: RetakenSteps, call: Callable[[], Result]) -> Result:
        def called() -> Result:
            result = call()
            if self._retaken is not None:
                self._compare(retaken, retaken.compare_end)
            return result

        return retaken.run(called, self._go_back_in_place)

    def _compare(self, retaken: RetakenSteps, compare: Callable[[Ranks], object]) -> None:
        if self._process.begins:
            retaken.give_up("a WorkQueue yields each item once, so a second pass would take different items")
        self._require_equal()
        ddp.sync_buffers_all()
        ddp.settle_all()
        try:
            compare(self._ranks())
        except HiddenStateError:
            self._points.wait_for_all()  # a rank that leaves first must not look like a lost peer to the others
            raise
        self._state.takes_again(False)
        if self._replay is not None:
            self._replay.follow(True)

    def _ranks(self) -> Ranks:
        device, rank = self._process.device, self._points.present().rank

        def share(text: str, source: int) -> str:
            packed = memoryview(bytearray(text.encode() or b" ")) if rank == source else None
            return bytes(transfer.broadcast(packed, source, device)).decode().strip()

        return Ranks(rank, lambda number: transfer.gather(number, device), share)

    def _go_back_in_place(self) -> None:
        """Return to the last commit as after a loss, but in the same generation and group."""
        state, points, formed = self._state, self._points, self._formed
        assert formed is not None, "a generation has begun"
        point = state.recall()
        assert point is not None, "only a step behind a copied commit is taken again"
        state.on_reset()
        state.enter_group()
        ddp.attach_all(formed, points.layouts)
        state.begin(point)
        points.keep_generators(point)
        state.takes_again(True)
        if self._replay is not None:
            self._replay.follow(False)
        self._uncommitted = 0
        self._agent.observe = self._probe_of(formed)
        self._step_times.begin(state.completed_steps, points.present().world_size)

    def flush(self) -> None:
        """Wait until everything saved so far is durable."""
        self._points.folder.flush()

    def check(self) -> None:
        """Raise the error that ended the generation or asks this rank to leave. Called at every commit."""
        self._uncommitted = 0
        if self._agent.must_end is None:
            self._process.departure.obey()
        self._agent.check()
        if self._agent.stops_here and self._formed is not None:
            self._agent.observe = _nowhere  # waiting for the others is not a hang
            self._agent.stop_together()
            self._agent.observe = self._probe_of(self._formed)

    def sync(self) -> None:
        """Copy rank 0's state to every rank."""
        self._points.take_from_rank_0()
        self._state.begin(Point(self._state.completed_steps, self._points.present().generation))

    # ---- from one generation to the next

    def _take_seat(self) -> None:
        """Prepare for the role that was assigned to this process: a spare, or a member with a slot."""
        slot = self._process.admitted.slot
        if slot is None:
            self._points.start_writer_ahead()
            log.say("this spare is warm: it takes the place of the next worker that is lost")
        else:
            self._points.take_slot(slot)
        self._state.bind(self, slot or 0)

    def _come_back(self, reason: str) -> None:
        """Register again after another node has taken this slot, without repeating expensive preparations."""
        log.warn(f"{reason}: this process registers again, without its state")
        self._go_outside()
        if self._process.group is not None:
            self._process.group.drop()
            self._process.group = None
        self._begin_to_connect(None)
        self._state.forget()
        self._live = None
        if self._replay is not None:
            self._replay.close()
            self._replay = None
        self._points.release()
        self._points = StatePoints(self._process, self._state)
        try:
            with self._process.departure.waits():
                self._process.take_seat_again()
        except RefusedError as error:
            raise FencedError(f"{reason}; there is no other seat for this process: {error}") from error
        self._agent = self._process.agent
        self._take_seat()

    def _enter(self) -> GenerationStarted | Point:
        self._tuning.begin()
        sharding = self._sharding()
        self._has_replicas = sharding is not None and sharding.has_replicas
        self._numerics = (*numerics.describe(self._process.device), *self._meshes())
        self._begin_to_connect(self._next_place())
        with self._process.departure.waits(), self._tuning.waits():
            generation = self._agent.enter(self._entry(look=False), self._enter_again)
        if isinstance(generation, Point):
            self._begin_to_connect(None)
        return generation

    def _meshes(self) -> Iterator[tuple[str, str]]:
        """Describe the meshes. They must be equal on all ranks, so they are compared like settings that affect bits."""
        for number, one in enumerate(meshes.declared()):
            yield f"device mesh {number}", str(one)
        if (sharding := self._sharding()) is not None:
            yield "sharding", f"{sharding.sizes} replicated {sharding.replicates}"

    def _sharding(self) -> Sharding | None:
        return self._state.sharding(self._process.admitted.world_size)

    def _next_place(self) -> RankPosition | None:
        """Return the place in the open round, or else the current place, or else the seat's place.

        Return None for a spare.
        """
        offered, present = self._agent.offered_place, self._points.generation
        slot, world_size = self._process.admitted.slot, self._process.admitted.world_size
        if offered is not None:
            return offered
        if present is not None:
            return RankPosition(present.slot, present.rank, present.world_size)
        # A seat outside the world gets its place from a round.
        return None if slot is None or slot >= world_size else RankPosition(slot, slot, world_size)

    def _begin_to_connect(self, place: RankPosition | None) -> None:
        """Start forming the next group for this place. With None, drop all groups that are being formed."""
        if place is None:
            self._next_groups.drop()
            return
        self._points.take_slot(place.slot)
        self._next_groups.offer(place)

    def _enter_again(self, asked: EnterAgain) -> Holdings:
        """Answer a round that asks for points on disk, assigns a different place, or rolls all ranks back."""
        if asked.back_to is not None and asked.back_to != self._back_to:
            self._live, self._back_to = self._points.go_back(asked.back_to), asked.back_to
        if asked.place is not None:
            self._begin_to_connect(asked.place)
        return self._entry(look=asked.look, committed=asked.committed)

    def _entry(self, *, look: bool, committed: Point | None = None) -> Holdings:
        group = self._next_groups.present
        return Holdings(
            points=tuple(self._points.held(committed)) if look else (),
            own_parts=self._state.has_own_parts,
            sharding=self._sharding(),
            numerics=self._numerics,
            blob=b"" if group is None else group.blob(),
            place=None if group is None else group.place,
            live=self._live,
            looked=look,
            commits=self._points.commits,
            copies=tuple(self._points.copies()) if look else (),
            page=self._points.page(),
            kept=self._points.kept(),
            orphaned_pages=self._points.orphaned_pages(),
            live_step=self._points.generators.live_step(self._live, self._points.commits),
            back_to=self._back_to,
            folder=self._points.searched if look else "",
            failed_with=shortened(self._failed_with, MAX_END_CHARS, IN_LOGS),
        )

    def _begin(self, generation: GenerationStarted) -> None:
        began = time.monotonic()
        process, is_first = self._process, self._is_new
        self._is_new, self._back_to = False, None
        self._points.generation = process.generation = generation
        process.publish_place()
        self._begin_to_connect(RankPosition(generation.slot, generation.rank, generation.world_size))
        next_group = self._next_groups.take()
        if not self._agent.is_addressed:  # the blob sent on entering was for a different place
            self._agent.publish(generation.generation, next_group.blob())
        before, process.group = process.group, next_group.begins(generation, self._agent)
        if before is not None:  # the group of this process alone, while the next one connects
            before.step_aside()
        self._watch(process.group)
        self._agent.observe = self._probe_of(process.group, forms=True)
        try:
            formed = process.group.form()
        finally:
            if before is not None:
                before.drop()
        if not is_first or generation.world_size != process.admitted.world_size:
            self._state.on_reset()
        self._formed = formed
        is_resumed = not is_first or generation.restore is not None
        if self._retaken is not None and is_resumed and not (is_first and self._retaken.follow(generation.rank)):
            self._retaken.give_up("the job's members have changed")
        self._restore(generation, formed)
        self._points.exchange_copies(formed)
        if generation.watches is not None:
            beside = MemberInfo.unpack(formed.info_of(generation.watches))
            if beside.life_sign is not None:
                self._agent.watch(beside.node, beside.life_sign)
        self._agent.step = self._state.completed_steps
        for told in process.begins.values():
            told(generation)
        self._agent.observe, self._agent.pace = self._probe_of(formed), None
        self._step_times.begin(self._state.completed_steps, generation.world_size)
        self._audits.begins()
        self._agent.trains(generation.generation)
        self._tuning.end()
        log.say(
            f"generation {generation.generation}: rank {generation.rank} of {generation.world_size} "
            f"{'begins at' if generation.restore is None else 'continues from'} step {self._state.completed_steps}, "
            f"ready after {time.monotonic() - began:.3f} s ({generation.text})"
        )

    def _probe_of(self, formed: group.Group, *, forms: bool = False) -> Callable[[], Progress | None]:
        timeout_s = self._process.settings.hang.step_timeout_s
        return MainThreadProbe(lambda: self._agent.step, lambda: formed.collectives, timeout_s, forms=forms).look

    def _watch(self, formed: group.Group) -> None:
        """Let the control thread break the group from now on, even while this thread is blocked."""
        record = self._record_flight if self._process.device.type != "cpu" else None
        self._agent.on_break = stuck_collective.guarded(
            formed.break_,
            lambda: formed.is_cut,
            record,
            is_busy=devices.busy_watch(self._process.device),
            patience_s=self._longest_queue_s,
        )
        self._agent.check()

    def _settle(self) -> None:
        """Wait for the collectives that are queued on an accelerator; see :func:`_settle_device`."""
        before = self._settled
        self._settled = _settle_device(self._process, before)
        if self._settled is None or self._settled != before:
            self._settled_s = time.monotonic()

    def _longest_queue_s(self) -> float:
        """Return how many seconds the work queued on an accelerator may take.

        This is twice the longest step, or twice the steps since the device was last waited for.
        """
        if self._process.device.type == "cpu":
            return 0.0
        if self._longest_step_s == 0.0:
            return _FIRST_STEP_S
        return _TIMES_LONGEST_STEP * max(self._longest_step_s, self._committed_s - self._settled_s)

    def _record_flight(self, reason: str) -> None:
        recorder.write_flight_record(self._process.settings.log_dir, self._agent.node, reason)

    def _leave(self, reason: str, gently: bool) -> None:
        """Leave the generation. This is reported before anything slow, so that no rank waits for this one."""
        self._tuning.begin()
        if not gently:
            self._agent.report_failure()
        self._go_outside()
        step = self._state.completed_steps
        if self._process.group is not None:
            self._process.group.break_(reason)
            self._process.group.drop()
            self._process.group = None
        devices.require_sound(self._process.device)
        self._live = self._state.recall()
        told = self._agent.interrupted or gently  # the control thread has logged the reason already
        why = "" if told else f": {reason}"
        kept = "" if self._live is not None else "; the last commit is no longer in memory"
        log.warn(f"left the generation at step {step}{why}{kept}")

    def _go_outside(self) -> None:
        """Reset everything that applies only within a generation."""
        self._state.look_for_hidden(None)
        self._state.takes_again(False)
        self._formed, self._committed_s, self._settled = None, 0.0, None
        self._agent.on_break, self._agent.observe = _nothing_to_break, _nowhere
        self._comparison = None
        self._audits.close()
        stuck_collective.left()

    # ---- state

    def _restore(self, generation: GenerationStarted, formed: group.Group) -> None:
        state, points, point = self._state, self._points, generation.restore
        state.bind(self, generation.rank)
        if point is None:
            points.start_from_rank_0(formed)
            point = Point(state.completed_steps, generation.generation)
        else:
            points.exchange_pages()
            points.obtain(point, self._live, formed)
        points.due.begins(state.completed_steps, generation)
        state.begin(point)
        points.begin_comparing(point)
        points.keep_generators(point)
        points.begin_shard_copies(point)
        formed.breaker.before_launch = self._before_collective
        self._comparison = points.begin_comparison()
        self._log_steps(generation)

    def _before_collective(self, group: object) -> None:
        require_collective_allowed(group)
        self._points.generators.before_collective()

    def _require_equal(self) -> None:
        """Check before the first step or commit that all ranks have begun this generation with the same state."""
        if self._comparison is not None:
            comparison, self._comparison = self._comparison, None
            try:
                comparison()
            except LayoutError:
                self._state.forget()  # any rank may be wrong, so no rank's state may become the last commit
                self._points.wait_for_all()  # a rank that exits first must not look like a lost peer to the others
                raise

    def _log_steps(self, generation: GenerationStarted) -> None:
        """Log every step before it is taken, if the user asked for a step log."""
        if self._step_log is None:
            return
        if self._replay is None or self._replay.slot != generation.slot:
            if self._replay is not None:
                self._replay.close()
            header = LogHeader(self._process.admitted.job, generation.slot, self._agent.node)
            directory = checkpoints.rank_directory(self._points.local_folder(), generation.slot)
            self._replay = Replay(self._step_log, self._state, directory, header, self._points.folder.oldest_step)
        self._replay.begin(generation, self._state.completed_steps)

    # ---- the end

    def _finish(self, generation: GenerationStarted) -> None:
        """Make the final state durable, and wait until all ranks have done so.

        This rank may be needed until then. The final state is not a commit. After a loss, the function is called again
        from the last commit and repeats what it did afterwards.
        """
        state = self._state
        self._require_equal()
        has_uncommitted_steps, is_commit = bool(state.uncommitted_steps), state.holds_commit
        if has_uncommitted_steps:
            log.warn(
                f"the training function returned {state.uncommitted_steps} steps after its last state.commit(): they "
                "are committed now. Fix: call state.commit() after every step"
            )
        step = state.completed_steps
        self._agent.step = step
        ddp.sync_buffers_all()
        self._settle()
        point = Point(step, generation.generation)
        if has_uncommitted_steps:
            state.remember(point)
        if self._replay is not None:
            self._replay.committed(step)
            self._replay.finished()
        self._points.save_last(step, self._wait_for_room, is_commit=has_uncommitted_steps or is_commit)
        digests = self._points.digests.through(point, averages=bool(self._points.layouts))
        self._agent.complete(generation.generation, step, digests)
        self._points.keep_final(point)
        self._points.discard_memory()
        self._agent.on_break, self._agent.observe = _nothing_to_break, _nowhere
        if self._formed is not None and generation.rank == 0:
            self._formed.breaker.before_launch = _CollectiveAfterTraining().warn

    def _wait_for_room(self, pause_s: float) -> None:
        """Wait before the last state is saved again. The wait does not count as a hang.

        Raises:
            GenerationEndedError: a member was lost, and this rank is needed again.
            SameBitsError: the job ends, or this process is asked to leave it.
        """
        self._agent.observe = _nowhere
        until_s = time.monotonic() + pause_s
        while time.monotonic() < until_s:
            self.check()
            time.sleep(_LOOK_S)


def _settle_device(process: Worker, settled: int | None) -> int | None:
    """Wait for the collectives queued on an accelerator; raise if the group was broken before they ended.

    A collective that is aborted may end without an error and leave undefined bytes in its output, which neither a step
    nor a commit may use. If none was launched since the device was last waited for, only this rank's own work is
    queued. A break does not change that work, so the host may run ahead of it.

    Args:
        process: this process's worker.
        settled: the result of the previous call in this generation.

    Returns:
        The number of collectives launched, all of which have ended; None if that is not known.
    """
    if process.device.type == "cpu" or process.group is None:
        return None
    launched = process.group.launched()
    if launched is None or launched != settled:
        began_s = time.perf_counter()
        devices.settle(process.device)
        main_thread.waited_for_others(began_s)  # the host cannot tell computing from waiting
        if not process.group.is_quiet:  # the script has not waited for a collective, so neither has this stream
            launched = None
    process.group.breaker.check()
    return launched


_NOISE = re.compile(r"^(Got the following error when running the callback: )?(\w+Error: )?(\[[^\]]*\]\s*)?")


def _in_short(error: Exception) -> str:
    """Shorten the error to one line, because gloo's errors begin with a source file and end with unrelated advice."""
    return shortened(_NOISE.sub("", str(error).splitlines()[0]).partition(". ")[0], 200)


class _CollectiveAfterTraining:
    """Warns once about a collective after training, which no recovery could repeat."""

    def __init__(self) -> None:
        self._has_warned = False

    def warn(self, _group: object) -> None:
        """Warn that a collective is being launched."""
        if not self._has_warned:
            self._has_warned = True
            log.warn(
                f"{calling_place()}: a collective is called after the function that elastic.run calls has returned: if "
                "a rank is lost there, "
                "the job ends with status 80. Fix: move the call into that function"
            )


def _took_batch(began_s: float, sampler: object) -> None:
    main_thread.waited_for_data(began_s)
    last_batch.taken(sampler)
    took_batch(sampler)


def _nothing_to_break(_reason: str) -> None:
    """Do nothing, because there is no group between two generations."""


def _nowhere() -> None:
    """Report nothing, because no step is expected between two generations."""
