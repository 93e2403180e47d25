"""``samebits.WorkQueue``: work items shared by all ranks, each trained on exactly once.

A queue's state and items are durable keys of ``samebits.kv``. The state is one key, changed only if no other
process has changed it meanwhile, so it needs no lock.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import msgspec

from samebits.core.keys import queue_state
from samebits.core.keys.queue_state import DIGEST_BYTES, MAX_PUTS, PutBatch, WorkState
from samebits.core.messages import MAX_KEY_BYTES, MAX_VALUE_BYTES, GenerationStarted
from samebits.errors import GenerationEndedError, KeyValueError, ProtocolError, UsageError
from samebits.training.process import context, key_value

MOST_ITEMS_BYTES = MAX_VALUE_BYTES - 16
MOST_NAME_BYTES = MAX_KEY_BYTES - 64
KEPT_PUTS = 4
_DONE = b""

Result = TypeVar("Result")


class WorkQueue:
    """A queue of work items that outlives every process of the job.

    Create it with the same name on every rank, after :func:`init`. Take items in a step, use them, and commit: the
    commit removes them permanently. If the step is lost, its items return to the queue. Each item is therefore used in
    training once, whatever is killed. Items need no acknowledgement and have no time limit. With ``LocalSGD``, a loss
    may repeat items that other ranks have taken since the last average.

    Args:
        name: the queue's name in the job.

    Raises:
        UsageError: called before :func:`samebits.init`, or the name is not a string of 1 to 192 bytes.

    Example::

        queue = samebits.WorkQueue()
        queue.put(range(6))
        state = samebits.elastic.TorchState(model, optimizer, rng="per_step", seed=1)

        @samebits.elastic.run
        def train(state):
            while items := queue.take(2):
                optimizer.zero_grad()
                model(torch.full((len(items), 4), float(items[0]))).sum().backward()
                optimizer.step()
                state.commit()

        train(state)
        assert queue.waiting() == 0
    """

    def __init__(self, name: str = "work") -> None:
        packed = name.encode(errors="surrogatepass") if isinstance(name, str) else b""
        if not 0 < len(packed) <= MOST_NAME_BYTES:
            raise UsageError(
                f"samebits.WorkQueue({str(name)[:80]!r}): a name must have 1 to {MOST_NAME_BYTES} bytes. Fix: use "
                "another name"
            )
        self._key = f"work/{name}"
        self._items: dict[bytes, list[Any]] = {}  # items of the most recently used puts
        self._version = 0  # the state's version when last read; it only increases
        process = context.current(f"samebits.WorkQueue({name!r})")
        process.begins[self._key] = self._begin
        if process.generation is not None:
            self._begin(process.generation)

    def put(self, items: Iterable[Any], *, key: str | None = None) -> None:
        """Append items. Repeating the same call has no effect.

        A restarted rank may therefore repeat its puts, and all ranks may put the same items. A put is atomic for each
        64 KiB.

        Args:
            items: values that msgpack can encode: bytes, strings, numbers, lists and maps of them, each below 64 KiB.
            key: a name that distinguishes this put from an earlier put of equal items.

        Raises:
            UsageError: an item cannot be encoded or is too large.
            KeyValueError: 512 puts are not done yet, or ``samebits.kv`` is full.
        """
        if isinstance(items, str | bytes | bytearray | memoryview) or not isinstance(items, Iterable):
            raise UsageError(
                f"samebits.WorkQueue.put(): a {type(items).__name__} counts as one item, but several were expected. "
                "Fix: put([item])"
            )
        parts = list(_parts(items))
        name = hashlib.blake2b(key.encode(errors="surrogatepass") if key is not None else b"".join(parts)).digest()
        for number, part in enumerate(parts):
            digest = hashlib.blake2b(name + str(number).encode(), digest_size=DIGEST_BYTES).digest()
            count = len(msgspec.msgpack.decode(part))
            while not self._put(digest, part, count):
                continue

    def _put(self, digest: bytes, part: bytes, count: int) -> bool:
        """Return True if the items were added, now or earlier, and False if another process changed the state."""
        state, version = self._read()
        if any(one.key == digest for one in state.puts):
            return True
        items = key_value.read(self._of_items(digest))  # read after the state: a finished put's items are emptied first
        if items.version and items.value == _DONE:
            return True
        wider = queue_state.put(state, digest, count)
        if wider is None:
            raise KeyValueError(
                f"samebits.WorkQueue: {MAX_PUTS} puts are unfinished, the maximum. Fix: put more items at "
                "once, or fewer at a time"
            )
        if not items.version and not self._set(self._of_items(digest), part, 0):
            return False
        return self._set(self._key, queue_state.SCHEMA.pack(wider), version)

    def take(self, count: int = 1) -> list[Any]:
        """Return at most ``count`` items for this step; an empty list if no items are waiting.

        Call it between two commits, in the function that ``elastic.run`` calls. Other ranks may still get items when
        this rank gets none: to stop all ranks together, let them agree, for example with an ``all_reduce`` of the
        number of items that each rank got.

        Raises:
            UsageError: called outside ``elastic.run``, or ``count`` is below 1.
            KeyValueError: too many steps took items since the last checkpoint that every rank has on disk.
            GenerationEndedError: a member was lost; ``elastic.run`` handles it.
        """
        if not isinstance(count, int) or count < 1:
            raise UsageError(f"samebits.WorkQueue.take({count!r}): expected 1 or more. Fix: ask for one")
        process = context.current("samebits.WorkQueue.take()")
        generation = process.generation
        if generation is None or process.is_over or process.ending.is_through:
            raise UsageError(
                "samebits.WorkQueue.take(): no step would use an item that is taken outside the training function. "
                "Fix: call it "
                "in the function that samebits.elastic.run calls"
            )
        if process.agent.interrupted:
            process.agent.check()
        step = process.agent.step

        def taken(state: WorkState) -> tuple[WorkState, tuple[WorkState, list[int]]]:
            if state.generation > generation.generation:
                raise GenerationEndedError("samebits.WorkQueue: a later generation has begun; this one is over")
            state = queue_state.settle(state, generation.generation, _restore(generation))
            found = queue_state.take(state, count, generation.generation, step)
            if found is None:
                raise KeyValueError(
                    "samebits.WorkQueue: too many steps have taken items since the last checkpoint that every rank's "
                    "disk holds. Fix: save more often (CheckpointConfig), or take several items at once"
                )
            return found[0], (state, found[1])

        state, numbers = self._change(taken)
        return [self._item(state.put_of(number), number) for number in numbers]

    def waiting(self) -> int:
        """Return the number of waiting items, for example for :func:`samebits.report`."""
        return self._read()[0].waiting

    # ---- the state

    def _begin(self, generation: GenerationStarted) -> None:
        """At the beginning of a generation, return the items that the last generation lost to the queue."""

        def settled(state: WorkState) -> tuple[WorkState, None]:
            return queue_state.settle(state, generation.generation, _restore(generation)), None

        self._change(settled)

    def _change(self, change: Callable[[WorkState], tuple[WorkState, Result]]) -> Result:
        """Apply a change to the current state; repeat it if another process changed the state first."""
        while True:
            state, version = self._read()
            changed, result = change(state)
            committed = context.current("samebits.WorkQueue").agent.committed_point
            if committed is not None:
                changed, done = queue_state.forget(changed, committed.step)
                for one in done:
                    key_value.put(self._of_items(one.key), _DONE, durable=True)
                changed = queue_state.dropped(changed, done)
            if changed == state or self._set(self._key, queue_state.SCHEMA.pack(changed), version):
                return result

    def _read(self) -> tuple[WorkState, int]:
        found = key_value.read(self._key)
        if found.version < self._version:
            raise KeyValueError(
                f"samebits.WorkQueue: key {self._key!r}, which holds the queue, is gone: it was deleted, or "
                "the scheduler's RECOVERY_PATH was lost. Fix: keep RECOVERY_PATH on a disk that outlives its host"
            )
        self._version = found.version
        if not found.version:
            return WorkState(), 0
        try:
            return queue_state.SCHEMA.unpack(found.value), found.version
        except (ProtocolError, TypeError) as error:
            raise KeyValueError(
                f"samebits.WorkQueue: key {self._key!r} does not hold a queue ({error}). Fix: give the queue another "
                "name"
            ) from None

    @staticmethod
    def _set(key: str, value: bytes, version: int) -> bool:
        return key_value.compare_and_set(key, value, version, durable=True) is not None

    # ---- the items

    def _of_items(self, digest: bytes) -> str:
        return f"{self._key}/{digest.hex()}"

    def _item(self, one: PutBatch, number: int) -> Any:
        if one.key not in self._items:
            packed = key_value.get(self._of_items(one.key))
            while len(self._items) >= KEPT_PUTS:
                del self._items[next(iter(self._items))]
            self._items[one.key] = msgspec.msgpack.decode(packed)
        return self._items[one.key][number - one.first]


def _restore(generation: GenerationStarted) -> int:
    return 0 if generation.restore is None else generation.restore.step


def _parts(items: Iterable[Any]) -> Iterator[bytes]:
    """Yield the items as msgpack arrays, each small enough for one key."""
    part: list[msgspec.Raw] = []
    size_bytes = 0
    for item in items:
        try:
            packed = msgspec.msgpack.encode(item)
            msgspec.msgpack.decode(packed)  # an item that cannot be decoded would fail on every rank that takes it
        except (msgspec.MsgspecError, TypeError, OverflowError, UnicodeError, RecursionError) as error:
            raise UsageError(
                f"samebits.WorkQueue.put: msgpack cannot encode an item ({error}). Fix: put bytes, strings, "
                "numbers, and lists and maps of them"
            ) from None
        if len(packed) > MOST_ITEMS_BYTES:
            raise UsageError(
                f"samebits.WorkQueue.put: an item of {len(packed)} bytes exceeds the limit of {MOST_ITEMS_BYTES}. Fix: "
                "write it to a file that all hosts see, and put its path"
            )
        if size_bytes + len(packed) > MOST_ITEMS_BYTES:
            yield msgspec.msgpack.encode(part)
            part, size_bytes = [], 0
        part.append(msgspec.Raw(packed))
        size_bytes += len(packed)
    if part:
        yield msgspec.msgpack.encode(part)
