"""Save a state as restore points, send it to other ranks, and load it from any source, for one process.

Wherever a point comes from (live memory, disk, a copy, or another rank), one function loads it. The state is restored
completely or marked as unusable.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import xxhash

from samebits.core.messages import MAX_FOLDER_CHARS, Copy, GenerationStarted, KeptCommit, OrphanedPage, Page, Sharding
from samebits.core.point import Point
from samebits.errors import CheckpointError, DeviceLostError, GenerationEndedError, StoreError, UnequalError, UsageError
from samebits.service import log
from samebits.service.copies.buddy import brief_of
from samebits.spelling import spelled
from samebits.store import checkpoint as checkpoints
from samebits.store.checkpoint import LoadedPoint, Outgoing, PointHeader, StoredPoint, TensorPart
from samebits.training.checkpoint import staging
from samebits.training.checkpoint.digests import StateDigests
from samebits.training.checkpoint.kept_copies import KeptCopies
from samebits.training.checkpoint.kept_generators import KeptGenerators
from samebits.training.checkpoint.rank_checkpoints import RankCheckpoints
from samebits.training.checkpoint.rollback_copies import RollbackCopies, RollbackCopy, bytes_in
from samebits.training.checkpoint.save_schedule import comparisons_by, due_by
from samebits.training.checkpoint.shard_copies import CopySchedule, ShardCopies, ShardsAtRest
from samebits.training.group import ddp, meshes, transfer
from samebits.training.group import device as devices
from samebits.training.group.group import Group, discard, is_communication_failure
from samebits.training.process.context import Worker
from samebits.training.process.next_group import MemberInfo
from samebits.training.sharding.whole import has_pieces, whole
from samebits.training.state import snapshot
from samebits.training.state.base_state import State
from samebits.training.state.checkpoint_config import AUTO
from samebits.training.state.handlers import copied_tree
from samebits.training.state.snapshot import NamedTensors
from samebits.urls import without_credentials

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
"""Pauses between attempts to save the last state while the disk fails."""
_PREPARED_AT = 2
"""The commit at which memory is prepared. A joining process's first commit is part of a recovery: all others wait."""


def _every(process: Worker) -> int | str:
    """Return the number of steps between two comparisons, or 0 if a difference could not be repaired."""
    return process.settings.consistency.every if process.settings.enable_recovery else 0


def _copies_every(process: Worker) -> int | str:
    """Return SHARD_COPY_EVERY, or 0 if nothing is recovered."""
    return process.settings.shard_copy_every if process.settings.enable_recovery else 0


def _nothing() -> None:
    """Do nothing during a transfer."""


@contextlib.contextmanager
def _savable() -> Iterator[None]:
    """Context manager that reports a state that cannot be saved as the script's error, as retries cannot succeed."""
    try:
        yield
    except CheckpointError as error:
        raise UsageError(str(error).replace("state.shared.values.", "state.")) from None


class StatePoints:
    """Saves, sends and loads the points of one state in one process.

    Attributes:
        generation: the current one as announced to this process; None before the first.
        commits: number of commits on this process's line.
        layouts: layouts of the gradient buckets at the last commit, by wrapper.
        due: the save schedule.
        digests: reports for the comparison with other ranks.
        generators: this rank's generators, in a page that outlives its process.
    """

    def __init__(self, process: Worker, state: State) -> None:
        self.generation: GenerationStarted | None = None
        self.commits = 0
        self.layouts: Mapping[str, Any] = {}
        self.due = due_by(state.checkpoint_config, self._agree)
        self._comparisons = comparisons_by(_every(process), self._agree)
        self._kept = RollbackCopies()
        self._defers_copies = True  # whether weights and moments stayed those of a commit until the next step so far
        self._is_deferred = False  # whether the newest copy was made just before a step
        self._has_no_room = False  # lack of memory for copies was logged
        self._is_finite = True  # whether the gradients of the last step were finite
        self.digests = StateDigests(process.agent, state, self._comparisons.took)
        self._process = process
        self._state = state
        self._folder: RankCheckpoints | None = None
        self._left_out = 0  # commits without a save since the folder was opened
        self._copies = KeptCopies(process.admitted.job, memory=checkpoints.SHARED_MEMORY)
        self.generators = KeptGenerators(process.admitted.job, memory=checkpoints.SHARED_MEMORY)
        self._shard_copies = ShardCopies(process.admitted.job, memory=checkpoints.SHARED_MEMORY)
        self._copies_due = CopySchedule(_copies_every(process), lambda number: transfer.gather(number, process.device))
        self._copies_shards = False
        self._at_rest = ShardsAtRest()
        self._corrupted_at = 0  # the last step after which a shard of this rank had changed
        self._told_interval = 0

    # ---- the folder

    def take_slot(self, slot: int) -> None:
        """Use the slot's folder from now on."""
        if self._folder is None or self._folder.slot != slot:
            if self._folder is not None:
                self._folder.release()
            self._folder = self._open(slot)
            self._left_out = 0

    def start_writer_ahead(self) -> None:
        """Start a writer process before this process has a slot, because its imports take longer than a recovery."""
        config, listener = self._state.checkpoint_config, self._process.copy_listener
        if not config.async_save:
            return
        with contextlib.suppress(StoreError):  # the first save reports it too
            if listener is not None and config.buddy_copies is True:
                checkpoints.start_ahead(listener.command, (listener.descriptor,))
            else:  # the likely case
                checkpoints.start_ahead()

    def discard_memory(self) -> None:
        """Remove this job's points from memory after it has finished."""
        self.generators.let_go()
        self._shard_copies.discard()
        self.folder.discard_memory()  # removes the page too
        self._copies.discard()

    def release(self) -> None:
        """Release the folder and all memory for other processes."""
        checkpoints.dismiss_waiting()
        self._copies.let_go()
        self.generators.let_go()
        self._shard_copies.close()
        if self._folder is not None:
            self._folder.release()

    @property
    def folder(self) -> RankCheckpoints:
        """The checkpoint folder of the slot that this process holds."""
        assert self._folder is not None, "a process with a place has a slot"
        return self._folder

    def held(self, committed: Point | None = None) -> Sequence[Point]:
        """Return the verified points in this process's folder; empty if it has no folder yet.

        Args:
            committed: the newest point that every rank has held. While it is intact, no rank returns further back,
                unless the points of the ranks have different contents.
        """
        if self._folder is None:
            return ()
        is_alike = not self._state.has_own_parts and not self._state.shards()
        return self._folder.held(committed if is_alike else None)

    @property
    def searched(self) -> str:
        """Where :meth:`held` looks, for messages."""
        shown = without_credentials(str(self._root()))
        return "".join(one if one.isprintable() else "?" for one in shown)[:MAX_FOLDER_CHARS]

    def copies(self) -> Sequence[Copy]:
        """Return the verified copies of other ranks' points that this process can send."""
        return self._copies.look()

    def kept(self) -> tuple[KeptCommit, ...]:
        """Return the commits of this process's slot in its host's shared memory."""
        is_sharded = self._state.sharding(self._process.admitted.world_size) is not None
        self._copies_shards = is_sharded and _copies_every(self._process) != 0
        if self._folder is None or not self._copies_shards:
            return ()
        return self._shard_copies.offer(self._folder.slot)

    def copy_shard(self, step: int) -> None:
        """Copy the current commit to shared memory if a copy is due."""
        copies, due = self._shard_copies, self._copies_due
        if not self._copies_shards:
            return
        was_decided = due.is_decided
        is_due = due.is_at(step, fits=not copies.is_off)
        if due.is_decided and not was_decided:
            self._copies_are_decided()
        if is_due:
            self._copy_shard(Point(step, self.present().generation))
            due.copied(step)

    def begin_shard_copies(self, point: Point) -> None:
        """Begin a generation at this point, and copy the point.

        The point of step 0 is not copied, because it is on every disk.
        """
        generation = self.present()
        self._copies_due.begins(point.step)
        self._shard_copies.begins(Point(point.step, generation.generation))
        if point.step and self._copies_shards and not self._shard_copies.holds(point, self.commits):
            self._copy_shard(point)

    def _copy_shard(self, point: Point) -> None:
        generation = self.present()
        taken_apart = self._in_tensors(point)
        with _savable():
            self._shard_copies.copy(self.folder.slot, *taken_apart, ranks_here=generation.local_world_size)

    def _copies_are_decided(self) -> None:
        """Log the agreed interval, or free the copies if a rank has no memory for them."""
        due, copies = self._copies_due, self._shard_copies
        if due.refused_by and not copies.is_off:
            copies.is_off = True
            copies.discard()
            log.warn(
                f"commits are not copied to shared memory: rank {', '.join(map(str, due.refused_by))} has no room for "
                "its copies. Fix: see the warning in its log"
            )
        if due.interval != self._told_interval and self.present().rank == 0:
            self._told_interval = due.interval
            if due.interval:
                log.say(due.text)

    def page(self) -> Page | None:
        """Describe the generator page of this process's slot, written by this or an earlier process."""
        if self._folder is None or self._state.generators is None:
            return None
        return self.generators.offer(self._folder.slot)

    def orphaned_pages(self) -> tuple[OrphanedPage, ...]:
        """Describe the pages on this host whose ranks' processes are gone."""
        if self._folder is None or self._state.generators is None:
            return ()
        return self.generators.offer_orphaned(self._folder.slot)

    def exchange_pages(self) -> None:
        """Send each page to its rank if that rank is now on another host. A collective; pages are small."""
        generation = self.present()
        for loan in generation.page_loans:
            is_mine = loan.lender == generation.rank
            packed = memoryview(bytearray(self.generators.lent[loan.slot])) if is_mine else None
            data = transfer.broadcast(packed, loan.lender, self._process.device)
            if loan.rank == generation.rank:
                self.generators.borrow(loan.slot, data, f"the page that rank {loan.lender} has sent")
        self.generators.lent.clear()

    def keep_generators(self, point: Point) -> None:
        """Store the generators' current states as those of this commit, outside this process."""
        generation = self.present()
        self.generators.committed(self._state.generators, generation.slot, generation.generation, point, self.commits)

    def exchange_copies(self, formed: Group) -> None:
        """Start exchanging copies of new points with this generation's buddies."""
        generation, process, config = self.present(), self._process, self._state.checkpoint_config
        brief = None
        wanted = config.async_save and (generation.is_apart if config.buddy_copies == AUTO else config.buddy_copies)
        if wanted and generation.buddy is not None and process.copy_listener is not None:
            brief = brief_of(
                process.agent.keys,
                str(checkpoints.SHARED_MEMORY),
                process.admitted.job,
                MemberInfo.unpack(formed.info_of(generation.buddy)).copies,
                f"rank {generation.buddy}",
                generation.keeps,
                process.copy_listener.keeper.ticket,
            )
        self.folder.exchange_copies(brief)
        self._copies.begin(generation.generation, () if brief is None else generation.keeps)

    def local_folder(self) -> Path:
        """Return the folder for files that an object store cannot hold."""
        return self._local_folder_for(self._root())

    def _local_folder_for(self, root: checkpoints.Location) -> Path:
        return checkpoints.local_folder(root, self._process.settings.recovery_path.resolve())

    def _root(self) -> checkpoints.Location:
        config, settings = self._state.checkpoint_config, self._process.settings
        if settings.hidden_state == "check":  # a separate job: it must not use the folder of the script's real jobs
            config = replace(config, directory=None)
        return config.folder_below(settings.checkpoint_path)

    def _open(self, slot: int) -> RankCheckpoints:
        process, agent, root = self._process, self._process.agent, self._root()
        return RankCheckpoints(
            self._state.checkpoint_config,
            root,
            local_state=self._local_folder_for(root),
            job=process.admitted.job,
            job_name=process.job_name,
            slot=slot,
            node=agent.node,
            committed=lambda: agent.committed_point,
            report=agent.report_saved,
            memory=checkpoints.SHARED_MEMORY,
            listener=process.copy_listener,
        )

    # ---- saving

    def present(self) -> GenerationStarted:
        """Return the current generation."""
        if self.generation is None:
            raise UsageError("no generation has begun in this process")
        return self.generation

    def save(self, step: int) -> None:
        """Save the current state, on every rank at the same step."""
        self.layouts = ddp.capture_all()
        self._copies.saved_by_all(self._process.agent.committed_point)
        self.compare(step, is_save=True)
        self._save(Point(step, self.present().generation))

    def leave_out(self, step: int) -> None:
        """Handle a commit that is not saved, and prepare memory for later saves."""
        self.compare(step, is_save=False)
        self.folder.settle()
        self._left_out += 1
        if self._left_out == _PREPARED_AT:
            taken_apart = self._in_tensors(Point(step, self.present().generation))
            with _savable():
                self.folder.prepare(*taken_apart)

    def save_first(self) -> None:
        """Save the initial state. If the disk is full, log a warning and let training begin.

        Raises:
            StoreError: the folder cannot be written at all.
        """
        self._save_now(0)
        refused_by = self.folder.refused_by
        if refused_by is not None and not refused_by.may_pass:
            raise refused_by

    def save_last(self, step: int, pause: Callable[[float], object], *, is_commit: bool) -> None:
        """Save the state after the training function has returned, and retry as long as the disk fails.

        Args:
            step: the last commit's step.
            pause: waits for a number of seconds; raises an error to end the wait.
            is_commit: False if a value was changed since the last commit; the state is then saved beside the points.
        """
        pause_s = FIRST_PAUSE_S
        while not self._save_now(step, is_commit=is_commit):
            if pause_s == FIRST_PAUSE_S:
                log.warn(
                    f"the last state (step {step}) could not be saved; this rank keeps it in memory, and the job "
                    f"is not finished. Fix: make room in {self.searched}: saving is retried at least every "
                    f"{LONGEST_PAUSE_S:g} s. If the job is stopped before that, `{spelled('recover')}` resumes "
                    f"from an earlier point ({self.folder.newest_on_disk()})"
                )
            pause(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _save_now(self, step: int, *, is_commit: bool = True) -> bool:
        self.layouts = ddp.capture_all()
        point, wait_s = Point(step, self.present().generation), self._process.settings.topo_timeout_s
        if is_commit and not self.folder.has_on_disk(point):
            return self._save(point, durable=True, wait_s=wait_s)
        taken_apart = self._in_tensors(point)  # changes after the last commit, such as an epoch's end, belong to it
        with _savable():
            return self.folder.save_final(*taken_apart)

    def keep_final(self, point: Point) -> None:
        """Make the final state the point of the last step, unless that step's commit is saved.

        Tools and later jobs look for the final state there. Call this once training is finished on every rank, because
        until then a lost rank returns to an earlier point.
        """
        if self.folder.has_on_disk(point):
            return
        try:
            if not self.folder.link_final(self.folder.header(point, self.present().rank, self.present().world_size)):
                self._save(point, durable=True)
        except (CheckpointError, StoreError, UsageError) as error:
            log.warn(f"the final state (step {point.step}) is not among the checkpoints: {error}")

    def compare(self, step: int, *, is_save: bool) -> None:
        """Report the current state's digest if this commit must be compared."""
        point = Point(step, self.present().generation)
        is_due, kept, shards = step > 0 and self._comparisons.is_at(step), None, None
        if is_due and self._state.shards():
            began_s = time.monotonic()
            shards = self._at_rest.committed(self._state.shards(at_rest=True)) or None
            self._comparisons.took(2 * (time.monotonic() - began_s))  # they are hashed again before the next step
        elif is_due:
            kept = self._keep(point)
        self.digests.committed(
            point, self.commits, averages=bool(self.layouts), is_save=is_save, is_due=is_due, kept=kept, shards=shards
        )

    def require_shards_at_rest(self) -> None:
        """Check before a step that no shard has changed since the last commit, if that commit is compared.

        Raises:
            GenerationEndedError: a shard has changed; this rank's last commit is no longer in its memory, and all ranks
                return to the newest one that every rank's copies or checkpoints hold.
            UnequalError: a shard has changed again after the same step.
        """
        if not self._at_rest.is_due:
            return
        name = self._at_rest.changed(self._state.shards(at_rest=True))
        if not name:
            return
        step, rank = self._state.completed_steps, self.present().rank
        self._state.forget()
        is_again, self._corrupted_at = step == self._corrupted_at, step
        text = (
            f"rank {rank}'s {name} changed in memory after the commit of step {step}, and no operator wrote to it: "
            f"rank {rank}'s memory was silently corrupted{' again' if is_again else ''}"
        )
        follows = "the job ends" if is_again else "all ranks return to the newest copy or checkpoint of every shard"
        log.warn(f"{text}; {follows}")
        self._process.agent.report_anomaly(step, f"{text}; {follows}", is_verdict=True, comes_again=not is_again)
        if is_again:
            raise UnequalError(f"{text}. Fix: test the memory of rank {rank}'s host, and continue on another host")
        raise GenerationEndedError(text)

    def compare_if_not_finite(self, *, shards_are_finite: bool = True) -> None:
        """Report the last commit's digest if the gradients of the next step have just become not finite.

        Call this before a step. If one rank's weights were corrupted, the step would turn the weights of all ranks into
        NaN, and the ranks would be equal again at the next comparison. Each rank decides by itself. The scheduler
        compares the digests once all ranks have reported one, so a rank whose reduced gradients differ from the others'
        does not wait. No other digest has this key, because the next commit belongs to another step.

        Args:
            shards_are_finite: False on every rank if any rank's shards have such a gradient. As all ranks know it, they
                compare the last commit at once, and wait if it differs.
        """
        was_finite, self._is_finite = self._is_finite, shards_are_finite and ddp.gradients_are_finite()
        if self._is_finite or not was_finite or not self._process.settings.enable_recovery:
            return
        if self._state.compared() is None or not self._comparisons.are_on:
            return
        if not shards_are_finite:
            self._tell_difference(self.commits + 1)
            return
        point = Point(self._state.completed_steps, self.present().generation)
        self.digests.tell(self.digests.now(point, self.commits + 1, averages=bool(self.layouts)))

    def begin_comparing(self, point: Point) -> None:
        """Begin a generation's comparisons at ``point``."""
        self._is_finite = True
        sharding = self._replicated()
        self.digests.begin(None if sharding is None else sharding.key_of(self.present().rank))
        self._at_rest.committed({})
        self._kept.cancel()
        self._kept.begin(point)
        self._comparisons.begins(self._state.completed_steps, leads=self.present().rank == 0)

    def _keep(self, point: Point) -> RollbackCopy | None:
        """Copy the state for a rollback. Return None if nothing is compared or there is not enough memory."""
        began_s, compared = time.monotonic(), self._state.compared()
        contents = self._contents()
        if compared is None or not contents["shared"]["values"]:
            return None
        self.digests.settle()
        if self._kept.begun is not None:  # no step was noticed since
            self._defers_copies = False
            self._kept.cancel()
        self._kept.found_equal(self._process.agent.equal_point)
        if not self._kept.has_room(contents, self.present().local_world_size):
            self._say_no_room(bytes_in(contents))
            return None
        at_rest = self._state.at_rest(point) if self._defers_copies else ()
        kept = self._kept.keep(point, contents, self.layouts, compared, at_rest)
        self._is_deferred = self._kept.begun is not None
        self._comparisons.took(time.monotonic() - began_s)
        return kept

    def finish_copy(self) -> None:
        """Copy what the next step changes if the last commit is kept for a rollback. Call it before a step.

        By then all ranks have usually been found equal at that commit, so its copy replaces the one before it, and one
        copy is in memory instead of two.
        """
        kept = self._kept
        if kept.begun is not None:
            began_s = time.monotonic()
            self.digests.settle()
            if self._state.at_rest(kept.begun):
                kept.finish(self._process.agent.equal_point)
            else:  # the script writes to weights between a commit and the next step
                kept.cancel()
                self._defers_copies = False
            self._comparisons.took(time.monotonic() - began_s)
        elif self._is_deferred:  # a copy made at its commit needs the memory again at the next one
            kept.found_equal(self._process.agent.equal_point)
            kept.free_spare()

    def _say_no_room(self, size_bytes: int) -> None:
        if not self._has_no_room:
            self._has_no_room = True
            log.warn(
                f"not enough memory for a copy of the state ({size_bytes / 2**30:.1f} GiB per rank): ranks are still "
                "compared, but if they differ, all return to a checkpoint. Fix: add memory, or run fewer ranks on this "
                "host; CONSISTENCY=majority:0 compares only at saves"
            )

    def go_back(self, to: Point) -> Point | None:
        """Load the copy of this point, or of the newest point before it. Return None if there is no intact copy."""
        if self.generation is None:
            return None
        self.digests.settle()
        begun = self._kept.begun
        if begun is not None and begun <= to and self._state.at_rest(begun):
            self._kept.finish(self._process.agent.equal_point)
        self._kept.cancel()
        kept, state = self._kept.go_back(to), self._state
        if kept is None:
            if not state.shards():  # of which no copies are kept for this
                log.warn(f"must return to step {to.step}, but this process has no sound copy of it")
            state.forget()
            return None
        before = state.completed_steps
        contents = copied_tree(dict(kept.contents))  # the copy may be needed again
        self.commits, self.layouts = contents["commits"], copied_tree(dict(kept.layouts))
        self.due.become(contents.get("due", {}))
        state.load(contents, own=True)
        state.remember(kept.point)
        log.warn(f"goes back from step {before} to step {kept.point.step}, at which all ranks were equal")
        return kept.point

    def save_last_commit(self, *, leaves: bool = False) -> None:
        """Save the last commit before this process exits alone, so that the other ranks need not repeat it.

        Args:
            leaves: this process's successor may be on another host, which does not see this one's disk. So the buddy
                must have the last commit first, if it contains anything that no other rank has.
        """
        if self.generation is None or self._folder is None:
            return
        point = self._state.recall()
        if point is None:
            return
        hands_over = leaves and self._folder.has_buddy and (self._state.shards() or self._state.has_own_parts)
        try:
            is_saved = self._folder.has_on_disk(point)
            if is_saved and not hands_over:
                return
            if not is_saved:
                devices.require_sound(self._process.device)  # else copying from it may fail, or never end
                self._save(point, durable=not hands_over)
                if not self._folder.has_on_disk(point):
                    log.warn(f"the last commit (step {point.step}) is not saved: see the warning before this line")
                    return
            if hands_over and (problem := self._folder.hand_over(point)):
                log.warn(
                    f"the last commit (step {point.step}) is on this host's disk only: its copy did not reach another "
                    f"host: {problem}"
                )
            else:
                where = "on disk and on another host" if hands_over else "on disk"
                log.say(f"the last commit (step {point.step}) is {where}")
        except (CheckpointError, DeviceLostError, UsageError) as error:
            log.warn(f"the last commit (step {point.step}) could not be saved: {error}")

    def _save(self, point: Point, *, durable: bool = False, wait_s: float = 0.0) -> bool:
        """Save the current state with the layouts of the last commit."""
        taken_apart = self._in_tensors(point)
        with _savable():
            return self.folder.save(*taken_apart, durable=durable, wait_s=wait_s)

    def _in_tensors(self, point: Point) -> tuple[PointHeader, NamedTensors, checkpoints.Tree, dict[str, Any]]:
        generation = self.present()
        with _savable():
            tree, tensors = snapshot.take_apart(self._contents(), "state")
        return self.folder.header(point, generation.rank, generation.world_size), tensors, tree, dict(self.layouts)

    def _live(self, point: Point) -> Outgoing:
        """Prepare the live state for sending. It must not change until the other ranks have received it."""
        header, tensors, tree, layouts = self._in_tensors(point)
        with _savable():
            return Outgoing.of_state(header, snapshot.parts_of(tensors), tree, layouts)

    def _from_folder(self, point: Point) -> Outgoing:
        """Prepare one of this rank's points for sending."""
        if any(kept.point == point for kept in self.kept()):
            return Outgoing.of_point(self._shard_copies.read(point))
        with self.folder.rejecting(point):
            return Outgoing.of_point(self.folder.load(point, to_send=True))

    def _contents(self) -> dict[str, Any]:
        return {**self._state.contents(), "commits": self.commits, "due": self.due.contents()}

    def _agree(self, numbers: tuple[int, int]) -> tuple[int, int]:
        first, second = transfer.tell(numbers, 0, self._process.device)
        return first, second

    # ---- loading

    def start_from_rank_0(self, formed: Group) -> None:
        """Start with rank 0's initial state on all ranks, and save it as the durable point of step 0."""
        generation = self.present()
        ddp.attach_all(formed, None)
        self.layouts = ddp.capture_all()
        if generation.rank == 0:
            self.compare(0, is_save=True)
            self.save_first()
        received = self._share_of_rank_0(0)
        if received is not None:
            own = {**self._state.contents()["own"], "shards": {}}  # any shards would belong to another line
            self._become(received, own=own)
            self.compare(0, is_save=True)
            self.save_first()
        self._enter_group()  # sharded values were complete until here, so every rank starts from the same state

    def _enter_group(self) -> None:
        """Move the script's meshes and the sharded values to this generation's groups. A collective."""
        discard([meshes.form_all()])
        self._state.enter_group()

    def take_from_rank_0(self) -> None:
        """Copy rank 0's current state to all ranks. A collective."""
        received = self._share_of_rank_0(self._state.completed_steps)
        if received is not None:
            self._become(received)

    def _share_of_rank_0(self, step: int) -> LoadedPoint | None:
        """Send rank 0's live state to all ranks, and return it on the others. A collective."""
        generation = self.present()
        live = self._live(Point(step, generation.generation)) if generation.rank == 0 else None
        return transfer.share(live, 0, lambda preface: self.folder.receiving(preface, {}), self._process.device)

    def obtain(self, point: Point, live: Point | None, formed: Group) -> None:
        """Load the restore point from memory, disk or its source rank, and send it to ranks that need it.

        Args:
            point: where the generation begins.
            live: the commit this process holds in memory.
            formed: the generation's group; gradient buckets are laid out for it during the transfer.

        Raises:
            GenerationEndedError: the point is damaged or missing where it was offered.
        """
        generation = self.present()
        holds = generation.source == generation.rank
        is_live = holds and live == point
        own = self._state.contents()["own"] if not holds and live == point else None  # at most one commit behind
        self._enter_group()
        if live is not None and live.step > point.step:
            log.say(f"goes back from step {live.step} to step {point.step}: {live.step - point.step} to be repeated")
        if not is_live:
            self._state.forget()  # until it is restored completely
        try:
            # All transfers run in the order of their sources, so ranks that both send and receive cannot deadlock.
            received = None if holds or generation.source > generation.rank else self._receive(formed)
            if is_live:
                # The point of step 0 was saved before sharding, so it is complete and any rank can take its part.
                is_initial = point.step == 0 and self._state.shards() and self.folder.has_on_disk(point)
                own_of = self._from_folder if is_initial else self._live
                self._send(point, own_of, meanwhile=lambda: ddp.attach_all(formed, self.layouts))
                return
            self._send(point, self._from_folder)
            found, filled = self._load(point) if holds else (received or self._receive(formed))
        except CheckpointError as error:
            raise GenerationEndedError(f"the restore point could not be loaded: {error}") from None
        self._become(found, own, filled)
        if found.header.world_size != generation.world_size:  # saved in a world of a different size
            self._state.on_reset()
        if holds:
            self._lay_out(formed, found.layout)

    def _lay_out(self, formed: Group, layouts: checkpoints.Tree) -> None:
        assert isinstance(layouts, dict), "a point's layouts are by wrapper"
        self.layouts = layouts
        ddp.attach_all(formed, layouts)

    def _receive(self, formed: Group) -> tuple[LoadedPoint, dict[str, torch.Tensor]]:
        """Receive the point from its source, and return it as :meth:`_load` does, without the source's own parts."""
        targets, tensors = self._targets({"shared": self._state.live_contents().get("shared", {})})
        found = transfer.receive(
            self.present().source,
            lambda preface: self.folder.receiving(preface, targets),
            lambda incoming: self._lay_out(formed, incoming.layout),
            self._process.device,
        )
        return found, _filled(found, targets, tensors)

    def _send(self, point: Point, own: Callable[[Point], Outgoing], meanwhile: Callable[[], object] = _nothing) -> None:
        """Send what other ranks load from this rank: its own point, and the copies that it stores.

        Args:
            point: the restore point.
            own: prepares this rank's own point for sending.
            meanwhile: called once, during the transfer of this rank's own point if there is one.
        """
        generation, device = self.present(), self._process.device
        if generation.serves:
            transfer.send(own(point), generation.serves, meanwhile, device)
        else:
            meanwhile()
        for loan in generation.lends:
            if loan.rank != generation.rank:
                copy = Copy(loan.slot, point)
                with self._copies.rejecting(copy):
                    lent = Outgoing.of_point(self._copies.read(copy))
                transfer.send(lent, (loan.rank,), _nothing, device)

    def load_final(self, point: Point) -> None:
        """Load the final state of a finished training without other ranks, from any rank's checkpoints.

        Raises:
            StoreError: no rank's folder has an undamaged copy.
        """
        job, root = self._process.admitted.job, self._root()
        own = None if self._folder is None else self._folder.slot
        if self._folder is not None:
            self._folder.discard_memory()
        self._copies.discard()
        for slot, store, found in self._saved(job, lambda one: one.step == point.step, first=own):
            try:
                final = store.read(found)
                contents = self._together(snapshot.state_in(final.tree, final.tensors), final.header)
            except CheckpointError as error:
                log.warn(f"ignored the final state in {found.where}: {error}")
                continue
            self._state.load(contents, own=slot == own)
            log.say(f"training has already finished: loaded the final state, step {point.step}, of slot {slot}")
            return
        raise StoreError(
            f"training finished at step {point.step}, but {root} holds no complete copy of that state. Fix: restore "
            "the checkpoint folder of any rank"
        )

    def _saved(
        self, job: str, fits: Callable[[Point], bool], first: int | None = None
    ) -> Iterator[tuple[int, checkpoints.PointStore[Any], StoredPoint]]:
        """Yield slot, store and point of all usable points that fit. Slot ``first`` comes first."""
        root, job_name = self._root(), self._process.job_name
        for slot in sorted(checkpoints.slots_in(root), key=lambda one: (one != first, one)):
            of_slot: dict[Point, tuple[checkpoints.PointStore[Any], StoredPoint]] = {}
            for place in (root, checkpoints.final_location(root)):  # a final state replaces its commit's point
                store = checkpoints.open_point_store(place, slot, job=job, job_name=job_name, claims=False)
                of_slot |= {one.point: (store, one) for one in store.scan() if one.is_usable and fits(one.point)}
            for point in sorted(of_slot, reverse=True):
                yield slot, *of_slot[point]

    def _together(self, contents: dict[str, Any], header: PointHeader) -> dict[str, Any]:
        """Complete sharded tensors in a point's contents from the other ranks' points, and return the contents."""
        if not has_pieces(contents["shared"]["values"]):
            return contents
        trees, owns = [contents["shared"]["values"]], []
        for _, store, found in self._saved(header.job, lambda one: one == header.point):
            other = store.read(found)
            theirs = snapshot.state_in(other.tree, other.tensors)
            trees.append(theirs["shared"]["values"])
            owns.append(theirs["own"].get("shards", {}))
        values = whole(trees, owns)
        return {**contents, "shared": {**contents["shared"], "values": values}}

    def begin_comparison(self) -> Callable[[], None]:
        """Start comparing the current state with every other rank's. A collective.

        Exchanging the few bytes takes one round over all ranks, which lasts as long as some other phases of a recovery.
        Only steps that cannot be undone must wait for the result.

        Returns:
            A function that waits for the outcome. If states differ, it reports each rank's digest to the scheduler and
            waits for its decision. It raises GenerationEndedError if all ranks are to return to an earlier point, and
            LayoutError, on every rank, if the difference cannot be repaired.
        """
        digest = xxhash.xxh3_64()
        for tensor in self._state.weights():
            digest.update(snapshot.bytes_of(tensor))
        digest.update(repr((self._state.completed_steps, self.commits, ddp.capture_all())).encode())
        gathered = transfer.begin_gather(digest.intdigest() >> 1, self._process.device)
        compare_shards = self._begin_comparing_shards()

        def finish() -> None:
            digests = gathered()
            if len(set(digests)) > 1:
                self._tell_restored_difference()
            transfer.require_equal(digests, "the restored state")
            compare_shards()

        return finish

    def _begin_comparing_shards(self) -> Callable[[], object]:
        """Start comparing this rank's shards with those of its replicas. A collective if there are replicas.

        Returns:
            A function that waits for the outcome and raises LayoutError, on every rank, if the shards differ.
        """
        if (sharding := self._replicated()) is None:
            return _nothing
        digest = xxhash.xxh3_64()
        for shard in self._state.shards().values():
            digest.update(snapshot.bytes_of(shard))
        gathered = transfer.begin_gather(digest.intdigest() >> 1, self._process.device)
        keys = [sharding.key_of(rank) for rank in range(self.present().world_size)]

        def finish() -> None:
            digests = gathered()
            if len(set(zip(keys, digests, strict=True))) > len(set(keys)):
                self._tell_restored_difference()
            for key in dict.fromkeys(keys):
                alike = {rank: digest for rank, digest in enumerate(digests) if keys[rank] == key}
                transfer.require_equal(alike, "the restored shard")

        return finish

    def _replicated(self) -> Sharding | None:
        """Return how the state is divided among the present ranks if several hold the same shards, otherwise None."""
        sharding = self._state.sharding(world_size := self.present().world_size)
        return sharding if sharding is not None and (sharding := sharding.resized(world_size)).has_replicas else None

    def _tell_restored_difference(self) -> None:
        """Let the scheduler handle a difference in the restored state, if the ranks can go back."""
        can_go_back = self.present().restore is not None and self._process.settings.enable_recovery
        if can_go_back and self._state.compared() is not None:
            self._tell_difference(self.commits)

    def _tell_difference(self, commits: int) -> None:
        """Let the scheduler handle a difference that is only in the state's values, such as a bit flip.

        Called on every rank with the same result. It returns if nothing differs, or anything else.

        Args:
            commits: the number under which the digests are reported.
        """
        generation, device = self.present(), self._process.device
        layouts = xxhash.xxh3_64_intdigest(repr((self._state.completed_steps, ddp.capture_all())).encode())
        point = Point(self._state.completed_steps, generation.generation)
        now = self.digests.now(point, commits, averages=bool(self.layouts))
        sharding, values = self._replicated(), transfer.gather(int.from_bytes(now.shared[:7]), device)
        differ = len(set(values)) > 1
        if sharding is not None:
            held = transfer.gather(int.from_bytes(now.held[:7]), device)
            by_key = {(sharding.key_of(rank), value) for rank, value in enumerate(held)}
            differ |= len(by_key) > sharding.key_count
        if len(set(transfer.gather(layouts >> 1, device))) == 1 and differ:
            self.digests.tell(now)
            self._process.agent.wait_for_end_of_generation()

    def wait_for_gradients(self) -> bool:
        """Wait until every rank has all gradients of its step, so that no rank takes a step that another cannot take.

        Returns:
            Whether every rank's sample of its shards' gradients is finite.

        Raises:
            RuntimeError: a rank was lost; this one is still at its last commit.
        """
        is_finite = ddp.are_finite(self._state.shards(gradients=True).values())
        return not any(transfer.gather(int(not is_finite), self._process.device))

    def wait_for_all(self) -> None:
        """Return when every rank has called this, or the group is broken."""
        try:
            transfer.gather(0, self._process.device)
        except Exception as error:
            if not is_communication_failure(error):
                raise

    def _load(self, point: Point) -> tuple[LoadedPoint, dict[str, torch.Tensor]]:
        """Return one of this rank's points, and the live tensors into which it was read, by name.

        After an error the state is undefined.
        """
        generation = self.present()
        for loan in generation.lends:
            if loan.rank == generation.rank:  # this rank has no point of its own
                copy = Copy(loan.slot, point)
                with self._copies.rejecting(copy):
                    return self._copies.read(copy), {}
        targets, tensors = self._targets(self._state.live_contents())
        threads = staging.loading_threads(generation.local_world_size)
        if any(kept.point == point for kept in self.kept()):
            found = self._shard_copies.read(point, targets, threads=threads)
            snapshot.state_in(found.tree, found.tensors)
            log.say(f"the restore point of {point} comes from this slot's copy in shared memory")
            return found, _filled(found, targets, tensors)
        with self.folder.rejecting(point):
            found = self.folder.load(point, targets, threads=threads)
            snapshot.state_in(found.tree, found.tensors)  # undamaged but not a state: reject it, another point will do
        return found, _filled(found, targets, tensors)

    @staticmethod
    def _targets(live: dict[str, Any]) -> tuple[dict[str, TensorPart], NamedTensors]:
        """Return the tensors into which a point can be read, in the store's form, and all tensors of the state."""
        _, tensors = snapshot.take_apart(live, "state")
        return snapshot.in_place(tensors), tensors

    def _become(
        self,
        found: LoadedPoint,
        own: Mapping[str, Any] | None = None,
        filled: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Load a point into the state.

        Args:
            found: the point.
            own: this rank's own parts, if they do not come from ``found``.
            filled: tensors of the state that already hold their part of the point, by name.
        """
        contents = snapshot.state_in(found.tree, found.tensors, filled, on_devices=True)
        self.commits = contents["commits"]
        self.due.become(contents.get("due", {}))
        is_own = found.header.slot == self.folder.slot
        if self.present().by_page:
            own = {**contents["own"], "rng": self.generators.states_at(found.header.point, self.commits)}
        if own is not None:
            contents, is_own = {**contents, "own": own}, True
        self._state.load(contents, own=is_own)


def _filled(found: LoadedPoint, targets: Mapping[str, TensorPart], tensors: NamedTensors) -> dict[str, torch.Tensor]:
    """Return the tensors that already hold their part of the point, by name."""
    return {name: tensor for name, tensor in tensors if name in targets and found.tensors.get(name) is targets[name]}
