"""Run a few steps a second time from the commit before them, and compare the resulting states.

``HIDDEN_STATE=stop`` and ``samebits run --check`` use this to test what a recovery would do, without losing a process:
the training function is called again in the same generation, as it would be after a loss. The state after the first run
is only compared; that of the last run is committed.
"""

from __future__ import annotations

import enum
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import xxhash

from samebits.core.point import Point
from samebits.errors import CheckpointError, GenerationEndedError, HiddenStateError, JobStoppedError
from samebits.printable import IN_LOGS, printable
from samebits.service import log
from samebits.store import durable, private
from samebits.store.retaken_report import RetakenReport
from samebits.training import value_trees
from samebits.training.group.calling_place import place_of
from samebits.training.group.failure import is_communication_failure
from samebits.training.state import snapshot
from samebits.training.state.base_state import State
from samebits.training.state.object_state import ObjectState
from samebits.training.state.script.hidden_state import HIDDEN_MESSAGES, HiddenChange, epochs_of, sentence_of
from samebits.training.state.torch_state import TorchState

_FIRST = 5
"""The first commit whose step is retaken; by then the search at commits 2 to 4 has named all that it can find."""
_LAST_OF_A_JOB = 8
_LAST_IN_A_ROW = 12
_MIDDLE_FROM, _MIDDLE_TO = 16, 32
"""A check retakes the steps at powers of two from the first number on, and lasts at least until the second."""
_AFTER_EPOCH = 2
"""Number of steps that a check retakes after the first epoch's end."""
_NAMED = 3
_MOST_CHARS = 300
_DIFFERS, _NAMES, _COMES_AGAIN = 1, 2, 4
"""Flags that a rank sends to the others: its state differs; it has findings; its last two passes are equal."""

Result = TypeVar("Result")


class TakeStepAgain(GenerationEndedError):
    """Raised in a commit to leave the training function; :meth:`RetakenSteps.run` then calls it again."""


class Extent(enum.Enum):
    """Which steps are repeated, and what follows from a difference without a known cause."""

    JOB = enum.auto()
    """HIDDEN_STATE=stop: the first few steps; training continues."""
    CHECK = enum.auto()
    """``samebits run --check``: also around the first epoch's end and in the middle; the job then ends."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """Communication between ranks through collectives, which all ranks call at the same commits.

    Attributes:
        rank: this process's rank.
        gather: returns the numbers of all ranks, in rank order.
        share: returns one rank's text on every rank; called with this rank's text and the source rank.
    """

    rank: int
    gather: Callable[[int], list[int]]
    share: Callable[[str, int], str]


class RetakenSteps:
    """Repeats steps of one process and compares their results.

    Args:
        state: the state whose steps are retaken.
        extent: which steps to retake.
        findings: returns the named values that changed outside the state so far.
        has_room: returns whether this host's memory has room for a copy of these contents.
        tell: called with the report whenever it has changed.
        has_tail: whether the training function has statements after its loop.
        restart: replaces all processes once the steps were retaken, and tells what to compare then; None: they stay.
        report: the report so far, of the processes before.
        set_at_first: returns the values that this process's first step has set.
    """

    def __init__(
        self,
        state: State,
        extent: Extent,
        findings: Callable[[], Sequence[HiddenChange]],
        has_room: Callable[[Any], bool],
        tell: Callable[[RetakenReport], None],
        *,
        has_tail: bool = False,
        restart: Restart | None = None,
        report: RetakenReport | None = None,
        set_at_first: Callable[[], Sequence[HiddenChange]] = tuple,
    ) -> None:
        self._state = state
        self._extent = extent
        self._findings = findings
        self._has_room = has_room
        self._tell = tell
        self._has_tail = has_tail
        self._restart = restart
        self._report = report or RetakenReport()
        self._set_at_first = set_at_first
        self._passes: list[PassDigests] = []
        self._is_over = False
        self._epochs: tuple[int, ...] | None = None  # the epochs at the last commit
        self._after_epoch: int | None = None  # steps retaken after the first epoch's end; None before it
        self._step = 0  # the last commit's step
        self._is_new_step = False  # the last commit has a later step than the one before

    @property
    def is_over(self) -> bool:
        """Whether no further step is retaken."""
        return self._is_over

    @property
    def is_under_way(self) -> bool:
        """Whether the training function is running a step for the second or third time."""
        return bool(self._passes)

    def run(self, call: Callable[[], Result], go_back: Callable[[], object]) -> Result:
        """Call the training function, and call it again from the last commit each time a step must be repeated.

        Args:
            call: the training function.
            go_back: restores the last commit.
        """
        while True:
            try:
                result = call()
                self._change(has_returned=True)
                return result
            except TakeStepAgain:
                pass
            except HiddenStateError as error:
                if not self._report.failure:  # the error was not found by a second pass
                    self._failure(str(error))
                raise
            except Exception as error:
                is_compared = self.is_under_way or (self._follows and not self._is_over)
                if is_compared and not (isinstance(error, JobStoppedError) or is_communication_failure(error)):
                    self._failed_in_pass(error)
                raise
            go_back()  # outside the handler, so that the traceback no longer keeps the first pass alive

    def compare(self, commit: int, ranks: Ranks) -> None:
        """Compare the results of a step that is about to be committed, if it is one of the repeated steps.

        Raises:
            TakeStepAgain: the step must be taken once more.
            HiddenStateError: the results differ, and the job must not train further.
        """
        if self._is_over:
            return
        if self._follows:
            self._compare_with_earlier(ranks)
            return
        if not (self._passes or self._is_wanted(commit)):
            return
        found, problem = _digests_of(self._state)
        if not all(ranks.gather(not problem)):  # either all ranks go back, or none
            self.give_up(problem or "another rank's state cannot be compared")
            return
        self._passes.append(found)
        if len(self._passes) == 1:
            raise TakeStepAgain(f"the step of commit {commit} is taken a second time")
        if self._judge(f"step {self._state.completed_steps}", ranks):
            self._change(equal=(*self._report.equal, self._state.completed_steps))

    def compare_end(self, ranks: Ranks) -> None:
        """Compare what the training function did after its last commit, if the check is not complete by then.

        Raises:
            TakeStepAgain: the function must be called once more.
            HiddenStateError: the results differ.
        """
        state = self._state
        if self._follows and not self._is_over and (left := sorted(self._expected)):
            raise self._differs_after_restart(f"training ended at step {state.completed_steps}, before step {left[0]},")
        holds = isinstance(state, ObjectState) and state.holds_copy and not state.uncommitted_steps
        if self._is_over or self._extent is not Extent.CHECK or not holds:
            return
        found, problem = _digests_of(state)
        if not all(ranks.gather(not problem)):
            self.give_up(problem or "another rank's state cannot be compared")
            return
        self._passes.append(found)
        if len(self._passes) == 1:
            raise TakeStepAgain("the code after the last commit is run a second time")
        if self._judge(f"the code after step {state.completed_steps}'s commit", ranks):
            self._replace_processes(ranks, has_returned=True)

    def committed(self, commit: int, ranks: Ranks) -> None:
        """Copy the state that is about to be committed, if later steps will be repeated."""
        state = self._state
        self._passes.clear()
        self._is_new_step = state.completed_steps > self._step
        self._step, self._epochs = state.completed_steps, epochs_of(state)
        if self._follows or self._is_over:
            pass
        elif self._is_complete(commit):
            if self._extent is Extent.CHECK and self._has_tail:
                tail = f"what the training function does after its last commit: it still trained at commit {commit}"
                self._change(skipped=(*self._report.skipped, tail))
            self._record(commit, is_last=True)
            self._replace_processes(ranks)
            self._end()
        else:
            self._record(commit)
        if self._is_over and isinstance(state, ObjectState):
            state.hold_copy(on=False)  # the live state is a commit only here, so the copy can be freed
        elif commit == _FIRST - 1:
            self._begin(ranks)

    def give_up(self, why: str) -> None:
        """Stop comparing, and report why."""
        if self._is_over:
            return
        log.warn(f"no further step is taken twice to find hidden state: {why}")
        self._change(skipped=(*self._report.skipped, why))
        self._end()

    def named(self) -> None:
        """Add values that have changed outside the state to the report."""
        self._change(named=sentence_of(self._findings()))

    # ---- in new processes

    @property
    def has_own_saves(self) -> bool:
        """Whether :meth:`saves` decides which commits are saved, instead of the script's schedule."""
        return self._restart is not None

    def saves(self, commit: int) -> bool:
        """Return whether to save the commit that was just made."""
        assert self._restart is not None
        return self._restart.saves(commit, self._step, is_after_epoch=self._after_epoch == 1)

    def follow(self, rank: int) -> bool:
        """Compare the following commits with those of this rank's last process; return False if it left none."""
        return self._restart is not None and self._restart.follow(rank)

    @property
    def _follows(self) -> bool:
        return self._restart is not None and self._restart.expected is not None

    @property
    def _expected(self) -> dict[int, PassDigests]:
        assert self._restart is not None
        assert self._restart.expected is not None
        return self._restart.expected

    def _record(self, commit: int, *, is_last: bool = False) -> None:
        restart = self._restart
        if restart is None or not self._is_new_step or not (is_last or restart.wants(commit)):
            return
        found, problem = _digests_of(self._state)
        if not problem:
            restart.record(self._step, found)

    def _replace_processes(self, ranks: Ranks, *, has_returned: bool = False) -> None:
        """End all processes, so that new ones repeat the last steps, if there are any to compare."""
        restart = self._restart
        if restart is None or self._report.named or self._findings():
            return  # a value is named already, and the check fails
        if not all(ranks.gather(restart.has_records)):
            why = f"steps in new processes: the script ended before its {SAVED_AT[0] + 1}th commit"
            self._change(skipped=(*self._report.skipped, why))
        elif not all(ranks.gather(restart.await_checkpoint())):
            self._change(skipped=(*self._report.skipped, "steps in new processes: no checkpoint could be saved"))
        else:
            self._change()
            restart.replace_process(ranks.rank, lambda: ranks.gather(1), has_returned=has_returned)

    def _compare_with_earlier(self, ranks: Ranks) -> None:
        """Compare this commit with the one that the processes before made of the same step.

        Raises:
            HiddenStateError: the results differ.
        """
        step = self._state.completed_steps
        before = self._expected.pop(step, None)
        if before is None:
            return
        found, _ = _digests_of(self._state)
        differing = sorted(name for name in before | found if before.get(name) != found.get(name))
        told = ranks.gather(bool(differing))
        if any(told):
            names = ranks.share(", ".join(differing[:_NAMED]), told.index(True))
            raise self._differs_after_restart(f"step {step} differed in {names}")
        self._step = step
        self._change(restarted=(*self._report.restarted, step))
        if not self._expected and self._restart is not None and not self._restart.had_returned:
            self._end()

    def _differs_after_restart(self, what: str) -> HiddenStateError:
        found = self._set_at_first()
        named = f". Its first step set {', '.join(map(str, found[:_NAMED]))}" if found else ""
        return self._failure(
            f"{what} when new processes continued from a checkpoint, as after a loss: the script keeps a value that a "
            f"new process computes anew, such as one that only the first step sets{named}. Fix: keep it in "
            "TorchState(…), or compute it from the state"
        )

    # ---- which steps

    def _begin(self, ranks: Ranks) -> None:
        state = self._state
        if not isinstance(state, ObjectState):
            self.give_up(
                f"a {type(state).__name__} holds no copy of its last commit that a step could be repeated from"
            )
        elif not all(ranks.gather(self._has_room(state.contents()))):
            self.give_up("a host's memory has no room for a copy of the state for each of its ranks")
        else:
            state.hold_copy(on=True)

    def _end(self) -> None:
        self._is_over = True
        self._passes.clear()
        self._change(is_over=True)

    def _is_wanted(self, commit: int) -> bool:
        state = self._state
        if commit < _FIRST or not isinstance(state, ObjectState) or not state.holds_copy:
            return False
        if self._extent is Extent.CHECK and self._epochs and epochs_of(state) != self._epochs:
            self._after_epoch = self._after_epoch or 0
        is_after_epoch = self._after_epoch is not None and self._after_epoch < _AFTER_EPOCH
        is_middle = commit >= _MIDDLE_FROM and not commit & (commit - 1)
        if not (commit <= self._last_in_a_row or is_after_epoch or is_middle):
            return False
        if self._after_epoch is not None:
            self._after_epoch += 1
        if isinstance(state, TorchState) and state.counts_optimizer_steps and state.completed_steps == self._step:
            skipped = f"commit {commit} came without an optimizer step"
            self._change(skipped=(*self._report.skipped, skipped))
            return False
        return True

    @property
    def _last_in_a_row(self) -> int:
        return _LAST_OF_A_JOB if self._extent is Extent.JOB else _LAST_IN_A_ROW

    def _is_complete(self, commit: int) -> bool:
        if self._extent is Extent.JOB:
            return commit >= _LAST_OF_A_JOB
        is_after_epoch = not self._epochs or (self._after_epoch is not None and self._after_epoch >= _AFTER_EPOCH)
        is_recorded = self._restart is None or self._restart.is_complete(commit)
        return commit >= _MIDDLE_TO and is_after_epoch and is_recorded

    # ---- what the passes show

    def _judge(self, what: str, ranks: Ranks) -> bool:
        """Return True if all runs of the step gave the same result; otherwise, raise."""
        names_of_all = {name for one in self._passes for name in one}
        differing = sorted(name for name in names_of_all if len({one.get(name) for one in self._passes}) > 1)
        findings = self._findings()
        comes_again = self._passes[-2] == self._passes[-1]
        told = ranks.gather(_DIFFERS * bool(differing) | _NAMES * bool(findings) | _COMES_AGAIN * comes_again)
        if not any(one & _DIFFERS for one in told) and len(self._passes) == 2:
            self._passes.clear()
            return True
        source = next((rank for rank, one in enumerate(told) if one & _DIFFERS), 0)
        names = ranks.share(", ".join(differing[:_NAMED]), source)
        if any(one & _NAMES for one in told):
            source = next(rank for rank, one in enumerate(told) if one & _NAMES)
            sentence = ranks.share(sentence_of(findings) if findings else "", source)
            raise self._failure(f"two runs of {what} differ in {names}: {sentence}")
        if len(self._passes) == 2:
            raise TakeStepAgain(f"{what} is taken a third time")
        if all(one & _COMES_AGAIN for one in told):
            text = (
                f"{what} differed in {names} when the training function was called again from the commit before "
                "it, and did not differ when that was repeated: the step depends on something that such a call "
                "restarts, such as a batch number that enumerate() counts from 0, or on the last step's "
                "gradients. Fix: compute it from the state, as from state.completed_steps, and call zero_grad() in "
                "each step"
            )
        else:
            text = (
                f"three runs of {what} all differ in {names}, and no value outside the state "
                "was seen to change, so the step is not deterministic, or the cause is unknown. Fix: set "
                "torch.use_deterministic_algorithms(True) and a seed for every generator; otherwise, look in the "
                "training function, and in hooks, for values that are kept outside TorchState(…)"
            )
        raise self._failure(text)

    def _failed_in_pass(self, error: Exception) -> None:
        """Report an error of the script that occurs only when a step is repeated."""
        called = "called in a new process" if self._follows else "called again"
        step = self._state.completed_steps if self._follows else self._step
        self._change(
            failure=f"{called} from the commit of step {step}, as after a loss there, the training function "
            f"failed at {place_of(error)}: {type(error).__name__}: {printable(str(error), _MOST_CHARS, IN_LOGS)}. Fix: "
            "let it begin at any step, including the last of an epoch, where the loop over the loader has no batch left"
        )
        self._end()

    def _failure(self, text: str) -> HiddenStateError:
        self._change(failure=text)
        self._end()
        return HiddenStateError(text)

    def _change(self, **changes: Any) -> None:
        before = self._report
        values = {name: getattr(before, name) for name in before.__struct_fields__}
        self._report = RetakenReport(**{**values, "steps": max(self._step, before.steps), **changes})
        self._tell(self._report)


def _digests_of(state: State) -> tuple[PassDigests, str]:
    """Return the digests of all values of the current state by name, or the reason why there are none."""
    try:
        tree, tensors = snapshot.take_apart(state.contents(), "state")
    except CheckpointError as error:  # reported by the commit itself
        return {}, f"the state cannot be compared: {error}"
    found = {_short(name): xxhash.xxh3_64_intdigest(snapshot.bytes_of(tensor)) for name, tensor in tensors}
    for name, value in _leaves(tree, "state"):
        found.setdefault(_short(name), xxhash.xxh3_64_intdigest(repr(value).encode(errors="surrogatepass")))
    handlers = state.handlers.items() if isinstance(state, ObjectState) else ()
    records = [f"state.{name}.{key}" for name, handler in handlers for key in handler.records]
    records += [f"state.{HIDDEN_MESSAGES}"]
    # A recovery restores plain attributes, and some contain a time.
    records += [f"state.unlisted.{name}.attributes." for name, _ in handlers]
    return {name: one for name, one in found.items() if not name.startswith(tuple(records))}, ""


def _leaves(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    items = value_trees.children(tree)
    if items is None:
        yield path, tree
        return
    for key, value in items:
        yield from _leaves(value, f"{path}.{key}")


def _short(name: str) -> str:
    """Return a value's name as the script spells it, such as ``state.model.0.weight``."""
    return name.replace("state.shared.values.", "state.", 1).replace("state.shared.", "state.", 1)


# ---- the last steps of a check, repeated in new processes
#
# Steps that one process takes twice share whatever the process has kept since its start, such as a value that only the
# first step sets. A check therefore ends with a loss of all processes at once: the job recovers from a checkpoint, and
# its new processes compare their commits with the digests that the processes before left in LOG_DIR.

SAVED_AT = (6, 16)
"""The commits that a check saves, besides the first after a later epoch; new processes start from the last one."""
_RECORDED = 4
"""Commits after a saved one that are compared."""
_DURABLE_WITHIN_S = 60.0
_LOOK_S = 0.02
_MAX_BYTES = 64 << 20

PassDigests = dict[str, int]


class Restart:
    """The end of all processes of a check, and the commits to compare afterwards.

    Args:
        folder: where a rank leaves its digests for the process that replaces it.
        saved_by_all: returns the newest point that every rank has on disk.
        end: ends this process as a crash would.
    """

    def __init__(
        self,
        folder: Path,
        saved_by_all: Callable[[], Point | None],
        end: Callable[[], object] = lambda: os.kill(os.getpid(), signal.SIGKILL),
    ) -> None:
        self._folder = folder
        self._saved_by_all = saved_by_all
        self._end = end
        self._saved: tuple[int, int] | None = None  # number and step of the last saved commit
        self._records: dict[int, PassDigests] = {}  # by step
        self.expected: dict[int, PassDigests] | None = None  # in a process that has replaced another
        self.had_returned = False  # the training function had returned in the process before

    @property
    def has_records(self) -> bool:
        """Whether there is a saved commit, and one behind it to compare."""
        return bool(self._records)

    def saves(self, commit: int, step: int, *, is_after_epoch: bool) -> bool:
        """Return whether to save this commit, for which the script's own schedule is not asked."""
        if self.expected is not None or not (commit in SAVED_AT or (is_after_epoch and commit > SAVED_AT[-1])):
            return False
        self._saved = commit, step
        self._records.clear()
        return True

    def wants(self, commit: int) -> bool:
        """Return whether this commit is one of the few after a saved one."""
        return self._saved is not None and 0 < commit - self._saved[0] <= _RECORDED

    def is_complete(self, commit: int) -> bool:
        """Return whether all commits that :meth:`wants` returned True for are made."""
        return self._saved is None or commit >= self._saved[0] + _RECORDED

    def record(self, step: int, digests: PassDigests) -> None:
        """Keep a commit's digests for the comparison."""
        if self._saved is not None and step > self._saved[1]:
            self._records[step] = digests

    def await_checkpoint(self) -> bool:
        """Return whether the saved commit is on every rank's disk."""
        assert self._saved is not None
        until_s = time.monotonic() + _DURABLE_WITHIN_S
        while (point := self._saved_by_all()) is None or point.step < self._saved[1]:
            if time.monotonic() > until_s:
                return False
            time.sleep(_LOOK_S)
        return True

    def replace_process(self, rank: int, meet: Callable[[], object], *, has_returned: bool) -> None:
        """Leave the digests for the next process of this rank, and end this one, together with the others.

        Args:
            meet: a collective of all ranks.
            has_returned: whether the training function has returned, so that the next process is to run to its end.
        """
        assert self._saved is not None
        durable.replace_note(self._path(rank), msgspec.msgpack.encode((has_returned, self._records)))
        log.say(f"this process ends itself, so that a new one starts from the checkpoint of step {self._saved[1]}")
        try:
            meet()
        finally:  # also if another rank is gone already: nothing of this process may survive
            self._end()

    def follow(self, rank: int) -> bool:
        """Take the digests that this rank's last process left; return whether there are any."""
        path = self._path(rank)
        data = private.read(path, _MAX_BYTES)
        if data is None:
            return False
        self.had_returned, self.expected = msgspec.msgpack.decode(data, type=tuple[bool, dict[int, PassDigests]])
        path.unlink()  # another loss has nothing to compare
        return True

    def _path(self, rank: int) -> Path:
        return self._folder / f"check_of_rank_{rank}"
