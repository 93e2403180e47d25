"""``elastic.run``: a training function that outlives the loss of its peers, in the same process.

One loop: wait in the rendezvous, form the generation's group, go to its restore point, call the user's function; when a
member is lost, leave whatever collective this rank is in, drop the group, and begin again. An error of the user's own
propagates unchanged. The function returns on no rank before the last commit of every rank is durable.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import xxhash

from runtime.core.agent_events import Entered
from runtime.core.messages import GenerationStarted
from runtime.core.point import Point
from runtime.errors import CheckpointError, GenerationEndedError, StoreError, UsageError
from runtime.service import voice
from runtime.service.agent import Agent
from runtime.store import checkpoint as store
from runtime.store.checkpoint import Checkpoint
from runtime.training import context, ddp, group, numerics, snapshot, transfer, watchdog
from runtime.training.checkpointing import RankCheckpoints
from runtime.training.context import Process
from runtime.training.state import TorchState

__all__ = ["TorchState", "run"]

State = TypeVar("State", bound=TorchState)
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def run(
    function: Callable[Concatenate[State, Parameters], Result],
) -> Callable[Concatenate[State, Parameters], Result | None]:
    """Decorate a training function ``function(state, …)`` so that it survives the loss of any process.

    The function is called anew after every loss and must go on from what ``state`` says. Where training is finished
    already (this process was started again afterwards) it is not called: the state becomes the final one and the result
    is None. With ``ENABLE_RECOVERY=0`` it is simply called.
    """

    @functools.wraps(function)
    def wrapper(state: State, /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result | None:
        process = context.current("runtime.elastic.run")
        if not process.settings.enable_recovery:
            return _run_once(process, state, lambda: function(state, *args, **kwargs))
        if process.has_trained:
            raise UsageError(
                "runtime.elastic.run was entered a second time: a job has one training function; call the second phase "
                "from within the first one, and keep in the state which phase it is in"
            )
        process.has_trained = True
        session = _Session(process, state)
        try:
            return session.run(lambda: function(state, *args, **kwargs))
        finally:
            session.close()

    return wrapper


class _CountingSession:
    """ENABLE_RECOVERY=0: a commit only counts."""

    def __init__(self, agent: Agent, state: TorchState) -> None:
        self._agent = agent
        self._state = state

    def commit(self) -> None:
        self._agent.step = self._state.completed_steps
        self._agent.check()


def _run_once(process: Process, state: State, call: Callable[[], Result]) -> Result:
    state.bind(_CountingSession(process.agent, state), context.get_rank())
    state.begin()
    try:
        return call()
    finally:
        state.bind(None, context.get_rank())


class _Session:
    """One call of a function under ``elastic.run``, through all its generations."""

    def __init__(self, process: Process, state: TorchState) -> None:
        self._process = process
        self._agent = process.agent
        self._state = state
        self._due_step = 0  # the last step at which a checkpoint was due
        admitted, settings = process.admitted, process.settings
        config = state.checkpoint_config
        self._checkpoints = RankCheckpoints(
            config,
            Path(config.directory or settings.checkpoint_path).resolve(),
            job=admitted.job,
            job_name=process.job_name,
            rank=admitted.slot,
            world_size=admitted.world_size,
            node=self._agent.node,
            wait_s=settings.topo_timeout_s,
        )
        state.bind(self, admitted.slot)

    def run(self, call: Callable[[], Result]) -> Result | None:
        """Call the function until it returns in a generation that ends well."""
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
                return result
            except Exception as error:
                if not group.is_communication_failure(error):
                    raise
                lost = _in_short(error)
            self._leave(lost)  # outside the handler: the traceback is gone, and with it what it kept alive

    def close(self) -> None:
        """The function is through, or failed for good."""
        ddp.generation_ended()
        self._state.bind(None, context.get_rank())
        self._checkpoints.release()

    # ---- commits

    def commit(self) -> None:
        """Called by the state at every commit: save where it is time to, then check the membership."""
        step = self._state.completed_steps
        self._agent.step = step
        interval = self._state.checkpoint_config.save_checkpoint_steps
        if step // interval > self._due_step // interval:
            # Decided by the step alone, whatever a rank's disk does: what is saved takes collectives.
            self._due_step = step
            ddp.sync_buffers_all()
            self._save(step)
        self._agent.check()

    def _save(self, step: int) -> bool:
        place = self._place()
        tree, parts = snapshot.split(self._state.contents(), "state")
        return self._checkpoints.save(Point(step, place.generation), parts, tree, ddp.capture_all())

    def _place(self) -> GenerationStarted:
        place = self._process.place
        if place is None:
            raise UsageError("no generation has begun in this process")
        return place

    # ---- from one generation to the next

    def _enter(self) -> GenerationStarted | Point:
        self._coming = self._process.take_coming_group()
        blob = self._coming.blob()
        place = self._agent.enter(
            Entered(
                tuple(self._checkpoints.held()),
                self._state.has_own_parts,
                numerics.describe(self._process.device),
                blob,
            )
        )
        if isinstance(place, Point):
            self._coming.group.drop()
        return place

    def _begin(self, place: GenerationStarted) -> None:
        began = time.monotonic()
        process = self._process
        process.place = place
        if process.group is not None:
            process.group.drop()
        process.group = self._coming.begins(place, self._agent)
        self._watch(process.group)
        self._restore(place, process.group.form())
        self._agent.step = self._state.completed_steps
        self._agent.trains(place.generation)
        voice.say(
            f"generation {place.generation}: rank {place.rank} of {place.world_size} "
            f"{'begins at' if place.restore is None else 'goes on from'} step {self._state.completed_steps}, "
            f"{time.monotonic() - began:.2f} s after it was told ({place.text})"
        )

    def _watch(self, formed: group.Group) -> None:
        """From now on the control thread can break the group, whatever this thread is blocked in."""
        self._agent.on_break = watchdog.guarded(formed.break_)
        self._agent.check()

    def _leave(self, reason: str) -> None:
        """The generation is over for this rank: say so before anything slow, and keep nobody waiting for it."""
        self._agent.report_failure()
        self._agent.on_break = _nothing_to_break
        watchdog.left()
        step = self._state.completed_steps
        if self._process.group is not None:
            self._process.group.break_(reason)
            self._process.group.drop()
            self._process.group = None
        told = self._agent.interrupted  # then the control thread has said why already
        voice.warn(f"left the generation at step {step}" + ("" if told else f": a collective failed: {reason}"))

    # ---- state

    def _restore(self, place: GenerationStarted, formed: group.Group) -> None:
        state, process = self._state, self._process
        state.bind(self, place.rank)
        if place.restore is None:
            self._start_from_rank_0(place, formed)
        else:
            found = self._obtain(place)
            state.load(snapshot.join(found.tree, found.tensors), own=found.header.rank == place.rank)
            ddp.attach_all(formed, found.layout)
        self._due_step = state.completed_steps
        state.begin()
        transfer.require_equal(self._digest(), "the restored state", process.device)

    def _obtain(self, place: GenerationStarted) -> Checkpoint:
        """This rank's copy of the restore point, or the one its source sends; and the copies this rank is to send."""
        point = place.restore
        assert point is not None
        device = self._process.device
        try:
            if place.source != place.rank:
                return self._checkpoints.unpack(transfer.receive(place.source, device))
            if place.serves:
                transfer.send(self._checkpoints.pack(point), place.serves, device)
            return self._checkpoints.load(point)
        except CheckpointError as error:
            if place.source == place.rank:
                self._checkpoints.reject(point, str(error))
            raise GenerationEndedError(f"the restore point could not be loaded: {error}") from None

    def _start_from_rank_0(self, place: GenerationStarted, formed: group.Group) -> None:
        """Nothing was ever committed: rank 0's initial state becomes everybody's, and a durable point of step 0."""
        state, process = self._state, self._process
        ddp.attach_all(formed, None)
        if place.rank == 0:
            self._save_or_fail(0)
        packed = self._checkpoints.pack(Point(0, place.generation)) if place.rank == 0 else None
        received = transfer.broadcast(packed, 0, process.device)
        if place.rank != 0:
            found = self._checkpoints.unpack(received)
            own = state.contents()["own"]
            contents = snapshot.join(found.tree, found.tensors)
            state.load({"shared": contents["shared"], "own": own}, own=True)
            self._save_or_fail(0)

    def _save_or_fail(self, step: int) -> None:
        if not self._save(step):
            raise StoreError(
                f"the state of step {step} could not be saved in {self._state.checkpoint_config.directory or ''}"
                f"{self._process.settings.checkpoint_path}: make room or set CHECKPOINT_PATH to a folder that can be "
                "written; `bash scripts/recover.sh` then goes on from the newest point"
            )

    def _digest(self) -> int:
        digest = xxhash.xxh3_64()
        for tensor in self._state.weights():
            digest.update(snapshot.bytes_of(tensor))
        digest.update(repr((self._state.completed_steps, ddp.capture_all())).encode())
        return digest.intdigest() >> 1

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
        self._save_or_fail(step)
        self._agent.complete(place.generation, step)
        self._agent.on_break = _nothing_to_break

    def _load_final(self, point: Point) -> None:
        """Training is finished: become the final state, alone, from this rank's point or another rank's."""
        admitted = self._process.admitted
        root = self._checkpoints.root
        ranks = [admitted.slot, *(rank for rank in range(admitted.world_size) if rank != admitted.slot)]
        for rank in ranks:
            for found in store.scan(store.rank_directory(root, rank), admitted.job):
                if found.point.step != point.step or not found.is_usable:
                    continue
                try:
                    final = store.read(found)
                except CheckpointError as error:
                    voice.warn(f"passed over the final state in {found.path}: {error}")
                    continue
                contents = snapshot.join(final.tree, final.tensors)
                self._state.load(contents, own=rank == admitted.slot)
                voice.say(f"training is finished already: this is the final state, step {point.step}, of rank {rank}")
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
