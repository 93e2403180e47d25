"""One call of a training function under ``elastic.run``, through all its generations.

Here lives the way from one generation to the next: wait in the rendezvous, form the group, become the restore point,
call the function; when a member is lost, leave whatever collective this rank is in, go back to the last commit, and
begin again. Never here: who is in a generation, what a state is made of, bytes on disk. The one idea: a survivor's
memory holds the last commit, so a recovery moves state only to who lacks it, and disks are read where all memories
together do not have it.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import xxhash

from runtime.core.agent_events import EnterAgain, Entered
from runtime.core.messages import GenerationStarted, Place
from runtime.core.point import Point
from runtime.errors import CheckpointError, GenerationEndedError, HostsUpdatedInterrupt, StoreError, UsageError
from runtime.service import voice
from runtime.store import checkpoint as store
from runtime.store.checkpoint import Checkpoint
from runtime.store.step_record import LogHeader
from runtime.training import ddp, group, numerics, snapshot, transfer, watchdog
from runtime.training.base_state import State
from runtime.training.checkpoint.due import due_by
from runtime.training.checkpoint.rank_checkpoints import RankCheckpoints
from runtime.training.checkpoint.replay import Replay, require_steps
from runtime.training.checkpoint.step_log import StepLog
from runtime.training.coming import ComingGroup
from runtime.training.context import Process
from runtime.training.departing import Stage
from runtime.training.warmth import warm_up

__all__ = ["Session"]

Result = TypeVar("Result")

HURRY_S = 0.0005
"""How soon a thread that waits for the interpreter gets it while a generation is left and the next one formed.

Several threads of ours hand work to each other then, and each hand-over may take that long; Python's own 5 ms would be
most of a recovery.
"""


class Session:
    """The running ``elastic.run`` of one process: of a worker, or of a spare that may become one at any moment."""

    def __init__(self, process: Process, state: State) -> None:
        self._process = process
        self._agent = process.agent
        self._state = state
        self._due = due_by(state.checkpoint_config, self._agree)
        self._layouts: Mapping[str, Any] = {}  # of the last commit
        self._live: Point | None = None  # the commit this process holds while it waits
        self._commits = 0  # of the line it is on
        self._at_ease_s = sys.getswitchinterval()
        self._place: GenerationStarted | None = None
        self._coming: ComingGroup | None = None
        self._own_folder: RankCheckpoints | None = None
        self._step_log = StepLog.of(state.checkpoint_config.step_log)
        self._replay: Replay | None = None
        if self._step_log is not None:
            require_steps(state)
        slot = process.admitted.slot
        if slot is None:
            warm_up(state, process.device, process.group)
            voice.say("this spare is warm: it takes the place of the next worker that is lost")
        else:
            self._take_slot(slot)
        state.bind(self, slot or 0)

    def run(self, call: Callable[[], Result]) -> Result | None:
        """Call the function until it returns in a generation that ends well."""
        self._process.departure.stage = Stage.TRAINING
        while True:
            lost = None
            try:
                place = self._enter()
                if isinstance(place, Point):
                    self._load_final(place)
                    return None
                self._begin(place)
                result = call()
                self._finish(place)
                self._process.departure.obey()
                return result
            except Exception as error:
                if not group.is_communication_failure(error):
                    raise
                lost = _in_short(error)
                gently = isinstance(error, HostsUpdatedInterrupt)
            self._leave(lost, gently)  # outside the handler: the traceback is gone, and with it what it kept alive

    def close(self) -> None:
        """The function is through, or failed for good."""
        self._process.departure.stage = Stage.OUTSIDE
        ddp.generation_ended()
        sys.setswitchinterval(self._at_ease_s)
        self._state.bind(None, 0 if self._place is None else self._place.rank)
        if self._own_folder is not None:
            self._own_folder.release()
        if self._replay is not None:
            self._replay.close()

    # ---- the state's commits

    def before_step(self) -> None:
        """What a commit needs all ranks for is done while a failure still leaves this rank at its last commit."""
        ddp.sync_buffers_all()
        ddp.settle_all()
        if self._replay is not None:
            self._replay.before_step()

    def save(self) -> None:
        """The state as it stands is a commit: remember it, and save it where it is time to."""
        place, state = self._present(), self._state
        step = state.completed_steps
        ddp.sync_buffers_all()  # where a forward pass came after the step
        layouts = ddp.settle_all()
        self._commits += 1
        state.remember(Point(step, place.generation))
        if layouts is None:
            state.forget()
        else:
            self._layouts = layouts
        self._agent.step = step
        if self._replay is not None:
            self._replay.committed(step)
        if self._due.is_at(step):  # on every rank, whatever its disk does
            with self._due.saving():
                self._save(step)
        else:
            self._checkpoints.settle()

    def flush(self) -> None:
        """Return once everything saved so far is durable."""
        self._checkpoints.flush()

    def check(self) -> None:
        """Raise what ended the generation, or asks this rank to leave it, or the job."""
        if self._agent.must_end is None:
            self._process.departure.obey()
        self._agent.check()

    def sync(self) -> None:
        """Make every rank's state rank 0's."""
        place = self._present()
        packed = self._packed(Point(self._state.completed_steps, place.generation)) if place.rank == 0 else None
        received = transfer.broadcast(packed, 0, self._process.device)
        if place.rank != 0:
            self._become(self._checkpoints.unpack(received))
        self._state.begin(Point(self._state.completed_steps, place.generation))

    def _save(self, step: int, *, durable: bool = False, wait_s: float = 0.0) -> bool:
        place = self._present()
        tree, tensors = snapshot.take_apart(self._contents(), "state")
        header = self._checkpoints.header(Point(step, place.generation), place.rank, place.world_size)
        return self._checkpoints.save(header, tensors, tree, ddp.capture_all(), durable=durable, wait_s=wait_s)

    def _packed(self, point: Point) -> memoryview:
        """The live state as bytes for another rank."""
        place = self._present()
        tree, parts = snapshot.split(self._contents(), "state")
        header = self._checkpoints.header(point, place.rank, place.world_size)
        return store.pack_state(header, parts, tree, dict(self._layouts))

    def _contents(self) -> dict[str, Any]:
        return {**self._state.contents(), "commits": self._commits, "due": self._due.contents()}

    def _load(self, point: Point) -> tuple[Checkpoint, dict[str, torch.Tensor]]:
        """One of this rank's points, and the live tensors that it was read into, by name.

        Where it fails, the state is no longer anything.
        """
        _, tensors = snapshot.take_apart(self._state.live_contents(), "state")
        targets = snapshot.in_place(tensors)
        found = self._checkpoints.load(point, targets)
        filled = {name for name, part in found.tensors.items() if part is targets.get(name)}
        return found, {name: tensor for name, tensor in tensors if name in filled}

    def _become(
        self,
        found: Checkpoint,
        own: Mapping[str, Any] | None = None,
        live: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Become what was found.

        Args:
            found: a point.
            own: this rank's own parts, where they are not to come from there.
            live: tensors of the state that hold their part of it already, by name.
        """
        contents = snapshot.join(found.tree, found.tensors, live)
        self._commits = contents["commits"]
        self._due.become(contents.get("due", {}))
        is_own = found.header.slot == self._checkpoints.slot
        if own is not None:
            contents, is_own = {**contents, "own": own}, True
        self._state.load(contents, own=is_own)

    def _agree(self, numbers: tuple[int, int]) -> tuple[int, int]:
        first, second = transfer.tell(numbers, 0, self._process.device)
        return first, second

    def _present(self) -> GenerationStarted:
        if self._place is None:
            raise UsageError("no generation has begun in this process")
        return self._place

    # ---- from one generation to the next

    def _enter(self) -> GenerationStarted | Point:
        sys.setswitchinterval(HURRY_S)
        self._numerics = numerics.describe(self._process.device)
        self._begin_to_connect(self._next_place())
        with self._process.departure.waits():
            place = self._agent.enter(self._entry(look=False), self._enter_again)
        if isinstance(place, Point):
            self._begin_to_connect(None)
        return place

    def _next_place(self) -> Place | None:
        """The one the open round offers; before there is any, the present one, or the seat's; none for a spare."""
        offered, present = self._agent.offered_place, self._place
        slot, world_size = self._process.admitted.slot, self._process.admitted.world_size
        if offered is not None:
            return offered
        if present is not None:
            return Place(present.slot, present.rank, present.world_size)
        return None if slot is None or slot >= world_size else Place(slot, slot, world_size)  # else a round will tell

    def _begin_to_connect(self, place: Place | None) -> None:
        """The next group is that of this place; what was begun for another one is given up."""
        if self._coming is not None and self._coming.place != place:
            self._coming.group.drop()
            self._coming = None
        if place is not None and self._coming is None:
            self._take_slot(place.slot)
            self._coming = self._process.take_coming_group(place)

    def _take_slot(self, slot: int) -> None:
        """The folder of the slot is this process's from now on."""
        if self._own_folder is None or self._own_folder.slot != slot:
            if self._own_folder is not None:
                self._own_folder.release()
            self._own_folder = self._checkpoints_of(slot)

    def _enter_again(self, asked: EnterAgain) -> Entered:
        """The round wants to know what the disk holds, or has another place for this process."""
        if asked.place is not None:
            self._begin_to_connect(asked.place)
        return self._entry(look=asked.look)

    def _entry(self, *, look: bool) -> Entered:
        coming = self._coming
        return Entered(
            points=tuple(self._checkpoints.held()) if look and self._own_folder is not None else (),
            own_parts=self._state.has_own_parts,
            numerics=self._numerics,
            blob=b"" if coming is None else coming.blob(),
            place=None if coming is None else coming.place,
            live=self._live,
            looked=look,
            commits=self._commits,
        )

    def _begin(self, place: GenerationStarted) -> None:
        began = time.monotonic()
        process, is_first = self._process, self._place is None
        self._place = process.place = place
        if process.group is not None:
            process.group.drop()
        self._begin_to_connect(Place(place.slot, place.rank, place.world_size))
        assert self._coming is not None, "a generation's member has a place"
        if not self._agent.is_addressed:  # what it entered with was made for another one
            self._agent.publish(place.generation, self._coming.blob())
        process.group, self._coming = self._coming.begins(place, self._agent), None
        self._watch(process.group)
        formed = process.group.form()
        if not is_first or place.world_size != process.admitted.world_size:
            self._state.on_reset()
        self._restore(place, formed)
        self._agent.step = self._state.completed_steps
        self._agent.trains(place.generation)
        sys.setswitchinterval(self._at_ease_s)
        voice.say(
            f"generation {place.generation}: rank {place.rank} of {place.world_size} "
            f"{'begins at' if place.restore is None else 'goes on from'} step {self._state.completed_steps}, "
            f"{time.monotonic() - began:.3f} s after it was told ({place.text})"
        )

    def _watch(self, formed: group.Group) -> None:
        """From now on the control thread can break the group, whatever this thread is blocked in."""
        self._agent.on_break = watchdog.guarded(formed.break_)
        self._agent.check()

    def _leave(self, reason: str, gently: bool) -> None:
        """The generation is over for this rank: say so before anything slow, and keep nobody waiting for it."""
        sys.setswitchinterval(HURRY_S)
        if not gently:
            self._agent.report_failure()
        self._agent.on_break = _nothing_to_break
        watchdog.left()
        step = self._state.completed_steps
        if self._process.group is not None:
            self._process.group.break_(reason)
            self._process.group.drop()
            self._process.group = None
        self._live = self._state.recall()
        told = self._agent.interrupted or gently  # then the control thread has said why already
        why = "" if told else f": a collective failed: {reason}"
        kept = "" if self._live is not None else "; the last commit is no longer in memory"
        voice.warn(f"left the generation at step {step}{why}{kept}")

    # ---- state

    def _restore(self, place: GenerationStarted, formed: group.Group) -> None:
        state, process, point = self._state, self._process, place.restore
        state.bind(self, place.rank)
        if point is None:
            self._start_from_rank_0(place, formed)
            point = Point(state.completed_steps, place.generation)
        else:
            self._obtain(place, point)
            ddp.attach_all(formed, self._layouts)
        self._due.begins(state.completed_steps, place)
        state.begin(point)
        transfer.require_equal(self._digest(), "the restored state", process.device)
        self._log_steps(place)

    def _obtain(self, place: GenerationStarted, point: Point) -> None:
        """Become the restore point: it is here, in memory or on disk, or its source sends it; and send it to others."""
        device, holds = self._process.device, place.source == place.rank
        is_live = holds and self._live == point
        own = self._state.contents()["own"] if not holds and self._live == point else None  # a commit behind, no more
        if not is_live:
            self._state.forget()  # until it is whole again
        try:
            if not holds:
                live: dict[str, torch.Tensor] = {}
                found = self._checkpoints.unpack(transfer.receive(place.source, device))
            else:
                if place.serves:
                    packed = self._packed(point) if is_live else self._checkpoints.pack(point)
                    transfer.send(packed, place.serves, device)
                if is_live:
                    return
                found, live = self._load(point)
        except CheckpointError as error:
            if holds and not is_live:
                self._checkpoints.reject(point, str(error))
            raise GenerationEndedError(f"the restore point could not be loaded: {error}") from None
        self._become(found, own, live)
        if found.header.world_size != place.world_size:  # saved in a world of another size
            self._state.on_reset()
        assert isinstance(found.layout, dict), "a point's layouts are by wrapper"
        self._layouts = found.layout

    def _start_from_rank_0(self, place: GenerationStarted, formed: group.Group) -> None:
        """Nothing was ever committed: rank 0's initial state becomes everybody's, and a durable point of step 0."""
        state, process = self._state, self._process
        ddp.attach_all(formed, None)
        self._layouts = ddp.capture_all()
        if place.rank == 0:
            self._save_or_fail(0)
        packed = self._checkpoints.pack(Point(0, place.generation)) if place.rank == 0 else None
        received = transfer.broadcast(packed, 0, process.device)
        if place.rank != 0:
            found = self._checkpoints.unpack(received)
            self._become(found, own=state.contents()["own"])
            self._save_or_fail(0)

    def _save_or_fail(self, step: int) -> None:
        if not self._save(step, durable=True, wait_s=self._process.settings.topo_timeout_s):
            raise StoreError(
                f"the state of step {step} could not be saved in {self._root()}: make room or set CHECKPOINT_PATH to a "
                "folder that can be written; `bash scripts/recover.sh` then goes on from the newest point"
            )

    def _log_steps(self, place: GenerationStarted) -> None:
        """From here on every step is logged before it is taken, where the user wants that."""
        if self._step_log is None:
            return
        if self._replay is None or self._replay.slot != place.slot:
            if self._replay is not None:
                self._replay.close()
            header = LogHeader(self._process.admitted.job, place.slot, self._agent.node)
            self._replay = Replay(self._step_log, self._state, store.rank_directory(self._root(), place.slot), header)
        self._replay.begin(place, self._state.completed_steps)

    def _digest(self) -> int:
        digest = xxhash.xxh3_64()
        for tensor in self._state.weights():
            digest.update(snapshot.bytes_of(tensor))
        digest.update(repr((self._state.completed_steps, self._commits, ddp.capture_all())).encode())
        return digest.intdigest() >> 1

    def _root(self) -> Path:
        return self._state.checkpoint_config.folder_below(self._process.settings.checkpoint_path)

    @property
    def _checkpoints(self) -> RankCheckpoints:
        assert self._own_folder is not None, "whoever has a place has a slot"
        return self._own_folder

    def _checkpoints_of(self, slot: int) -> RankCheckpoints:
        process = self._process
        return RankCheckpoints(
            self._state.checkpoint_config,
            self._root(),
            job=process.admitted.job,
            job_name=process.job_name,
            slot=slot,
            node=self._agent.node,
            committed=lambda: self._agent.committed_point,
            report=self._agent.report_saved,
        )

    # ---- the end

    def _finish(self, place: GenerationStarted) -> None:
        """Make the last commit durable and wait until that is so on every rank; until then this rank may be needed."""
        state = self._state
        if state.uncommitted_steps:
            voice.warn(
                f"the training function returned {state.uncommitted_steps} steps after its last state.commit(): they "
                "are committed now; call state.commit() after every step"
            )
        step = state.completed_steps
        self._agent.step = step
        ddp.sync_buffers_all()
        state.remember(Point(step, place.generation))
        if self._replay is not None:
            self._replay.committed(step)
            self._replay.finished()
        self._save_or_fail(step)
        self._agent.complete(place.generation, step)
        self._checkpoints.discard_memory()
        self._agent.on_break = _nothing_to_break

    def _load_final(self, point: Point) -> None:
        """Training is finished: become the final state, alone, from this rank's point or another rank's."""
        self._process.is_over = True
        if self._own_folder is not None:
            self._own_folder.discard_memory()
        root, own = self._root(), None if self._own_folder is None else self._own_folder.slot
        for slot in sorted(store.slots_in(root), key=lambda one: (one != own, one)):
            for found in store.scan(store.rank_directory(root, slot), self._process.admitted.job):
                if found.point.step != point.step or not found.is_usable:
                    continue
                try:
                    final = store.read(found)
                except CheckpointError as error:
                    voice.warn(f"passed over the final state in {found.path}: {error}")
                    continue
                self._state.load(snapshot.join(final.tree, final.tensors), own=slot == own)
                voice.say(f"training is finished already: this is the final state, step {point.step}, of slot {slot}")
                return
        raise StoreError(
            f"training is finished at step {point.step}, but no whole copy of that state is found in {root}: "
            "bring back the checkpoint folder of any rank"
        )


_NOISE = re.compile(r"^(Got the following error when running the callback: )?(\w+Error: )?(\[[^\]]*\]\s*)?")


def _in_short(error: Exception) -> str:
    """One line: gloo's errors begin with a source file and end with advice for another program."""
    return _NOISE.sub("", str(error).splitlines()[0]).partition(". ")[0][:200]


def _nothing_to_break(_reason: str) -> None:
    """Between two generations there is no group."""
