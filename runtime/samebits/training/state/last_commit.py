"""Keep the last commit in this process's memory at little cost, and restore it.

Until an optimizer begins its next step, weights and moments still equal the last commit. A commit after every step
therefore copies only the values that a forward pass or the user's loop can change. With several steps between two
commits, the tensors are copied too, over the previous commit. While they are copied, the live tensors are the commit.

A weight may also change outside a step, for example when an evaluation swaps in an average. A change in place increases
the tensor's version counter; a recovery then gets the commit from another source. A change through ``.data`` does not,
so a weight is copied when a script reads its ``.data`` between a commit and the next step. If a script sets a weight's
``.data``, a recovery gives the weight its own memory back. Scripts that do neither pay nothing.

If the loop changes the state after ``commit()`` but before its next iteration, a recovery would lose the change. Such a
change ends the job at the next step.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import xxhash

from samebits.core.point import Point
from samebits.errors import HiddenStateError
from samebits.service import log
from samebits.training import torch_private, value_trees
from samebits.training.group.calling_place import calling_place
from samebits.training.sharding.pieces import is_without_memory, local
from samebits.training.state import snapshot
from samebits.training.state.handlers import StateHandler, copied_tree, same
from samebits.training.state.module_state import MODE, are_alike
from samebits.training.state.script.after_commit import Instruction, Lines, RestOfTurn, line_after, to_loop

_MANY_ALIASES = 8
_LOOKED_AT = 128
"""Number of commits whose weights are hashed after a known line first writes to weights."""
_WEIGHT = "a weight"


class _Uses:
    """The weights whose ``.data`` the script has used since the last commit.

    Attributes:
        count: number of all uses.
    """

    def __init__(self) -> None:
        self.count = 0
        self._used: dict[int, _Weight] = {}
        self._has_told = False

    def add(self, weight: _Weight) -> None:
        """Record that a script uses this weight's ``.data``."""
        self.count += 1
        self._used[id(weight)] = weight

    def begin(self) -> None:
        """Start a new commit with the current weights."""
        self._used = {key: one for key, one in self._used.items() if one.committed()}

    @property
    def are_any(self) -> bool:
        """Whether the script may have changed a weight through ``.data`` since the last commit."""
        return bool(self._used)

    def assigned(self) -> None:
        """Warn once that a script has replaced a weight's memory."""
        if not self._has_told:
            self._has_told = True
            log.warn(
                f"{calling_place()}: a weight of the state was given another tensor's memory (parameter.data = …) "
                "between two commits. A survivor of a loss restores the weight's own memory, but tensors that share "
                "memory at a commit are separate in a replacement. Fix: parameter.copy_(…) under torch.no_grad()"
            )

    def have_changed(self) -> bool:
        """Return whether any of these weights is known to differ from the last commit."""
        return any(one.is_changed for one in self._used.values())

    def move_home(self) -> None:
        """Give each weight back the memory that it had at the last commit."""
        for weight in self._used.values():
            weight.move_home()

    def put_back(self) -> None:
        """Restore each weight's values from the last commit."""
        for weight in self._used.values():
            weight.put_back()


class _Weight:
    """One weight of the last commit, and how the script has used its ``.data`` since then.

    Args:
        tensor: the weight.
        commit: the commit it belongs to.
        uses: notified when its ``.data`` is used.
    """

    __slots__ = ("__weakref__", "_aliases", "_commit", "_copy", "_home", "_is_copied", "_uses", "is_plain", "tensor")

    def __init__(self, tensor: torch.Tensor, commit: LastCommit, uses: _Uses) -> None:
        self.tensor = tensor
        self.is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
        self._commit = commit
        self._uses = uses
        self._aliases: list[weakref.ref[torch.Tensor]] = []  # a script may still write to these
        self._copy: torch.Tensor | None = None
        self._is_copied = False  # whether it was copied since the last commit
        self._home: torch.Tensor | None = None  # the weight's memory at the last commit, if a script replaced it

    def was_read(self, alias: torch.Tensor) -> None:
        """Record that the script holds an alias of the weight's memory."""
        if self._commit.is_in_step or not self._commit.is_running:
            return  # an optimizer itself makes changes in this way, or no training runs
        if len(self._aliases) >= _MANY_ALIASES:
            self._aliases = self._alive()
        self._aliases.append(weakref.ref(alias))
        self._uses.add(self)
        if self._commit.is_exposed:
            self._copy_aside()

    def is_assigned(self) -> None:
        """Record that a script is about to set the weight's ``.data``."""
        commit = self._commit
        if commit.is_in_step or not commit.is_running or commit.point is None or not self.is_plain:
            return  # FSDP2's parameters front another object, so setting their data changes nothing
        if self._home is None:
            self._home = torch_private.data_of(self.tensor)
        self._uses.add(self)
        self._uses.assigned()

    def committed(self) -> bool:
        """Start a new commit, and return whether the script can still change the weight unnoticed."""
        self._home, self._is_copied, self._aliases = None, False, self._alive()
        if self._aliases and self._commit.is_exposed:
            self._copy_aside()
        return bool(self._aliases)

    def move_home(self) -> None:
        """Give the weight back the memory that it had at the last commit."""
        if self._home is not None:
            torch_private.give_data(self.tensor, self._home)
            self._home = None

    @property
    def is_changed(self) -> bool:
        """Whether the weight is known to differ from the last commit."""
        live = self._live()
        if self._home is not None and self._home.data_ptr() != live.data_ptr():
            return True
        return self._is_copied and self._copy is not None and not torch.equal(live, self._copy)

    def put_back(self) -> None:
        """Restore the values of the last commit if they may have changed."""
        if self._is_copied and self._copy is not None:
            self._live().copy_(self._copy)

    def _copy_aside(self) -> None:
        if self._is_copied:
            return
        live = self._live()
        if self._copy is not None and are_alike([self._copy], [live]):
            self._copy.copy_(live)
        else:
            self._copy = live.clone()
        self._is_copied = True

    def _live(self) -> torch.Tensor:
        """Return the weight's memory on this rank, without autograd and version counting."""
        return torch_private.data_of(local(self.tensor))

    def _alive(self) -> list[weakref.ref[torch.Tensor]]:
        return [one for one in self._aliases if torch_private.is_alive(one)]


_watched: dict[int, weakref.ref[_Weight]] = {}
"""Weights of all states, by the id of their tensor; a new tensor may reuse the id once a state is gone."""


def _watch(weight: _Weight) -> None:
    torch_private.watch_data(weight.tensor, _was_read, _is_assigned)
    key = id(weight.tensor)

    def gone(reference: weakref.ref[_Weight]) -> None:
        if _watched.get(key) is reference:
            del _watched[key]

    _watched[key] = weakref.ref(weight, gone)


def _was_read(tensor: torch.Tensor, alias: torch.Tensor) -> None:
    weight = _found(tensor)
    if weight is not None:
        weight.was_read(alias)


def _is_assigned(tensor: torch.Tensor) -> None:
    weight = _found(tensor)
    if weight is not None:
        weight.is_assigned()


def _found(tensor: torch.Tensor) -> _Weight | None:
    reference = _watched.get(id(tensor))
    weight = None if reference is None else reference()
    return weight if weight is not None and weight.tensor is tensor else None


class LastCommit:
    """Remembers commits of a state, and restores the last one if possible.

    Args:
        handlers: handlers of all values in the state, by name.

    Attributes:
        point: the last commit; None if there is none.
        copies: whether every commit is copied.
        holds_copy: whether each commit is copied to the host for now; set by :meth:`hold_copy`.
        is_in_step: whether an optimizer's ``step`` is running.
        is_running: whether a training function runs with the state, so that a loss is possible.
        is_saved: whether the last commit is also saved, so that a recovery may restore it whatever happens to it here.
    """

    def __init__(self, handlers: Mapping[str, StateHandler]) -> None:
        self.point: Point | None = None
        self.copies = False
        self.holds_copy = False
        self.is_in_step = False
        self.is_running = False
        self.is_saved = False
        self._handlers = handlers
        self._buffer: dict[str, Any] = {}  # memory of copies, which is reused
        self._newest: dict[str, Any] | None = None  # the buffer if it holds the commit of ``point``
        self._is_stepping = False  # whether an optimizer has begun a step since
        self._stepped: list[Sequence[torch.Tensor]] = []  # tensors that are not copied, by handler
        self._weights: list[_Weight] = []
        self._versions: list[int] = []
        self._places: list[int] = []
        self._uses = _Uses()
        self._after = _AfterCommit(self)

    def is_made_in(self, frame: FrameType) -> None:
        """Watch the loop that has called ``commit()`` for changes made after the commit."""
        self._after.follow(frame)

    def is_assigned(self, name: str) -> None:
        """Record that the script has assigned an attribute of the state."""
        self._after.assigned(f"state.{name}")

    def stepping(self) -> None:
        """Record that an optimizer step begins, so that the live tensors no longer equal the commit.

        Raises:
            HiddenStateError: the state was changed after the commit, in its loop.
        """
        if not self._is_stepping and self.point is not None:
            self.require_unchanged_since_commit()
            self._after.stop()
        self._is_stepping = self.is_in_step = True

    def require_unchanged_since_commit(self, *, at_end: bool = False) -> None:
        """Check that the loop has not changed the state since the last commit.

        Called before the first step or commit after it, and when the training function returns.

        Raises:
            HiddenStateError: the loop changed the state after its commit, where no recovery would repeat the change.
        """
        change = self._after.lasting_change(at_end=at_end)
        if change is not None:
            line, what = change
            raise HiddenStateError(
                f"{line}: {what} changed after state.commit(), in the same loop: a recovery at that commit would "
                "not repeat the change, and the job would end with different bits. Fix: change it before "
                "state.commit()"
            )

    def changes(self) -> list[str]:
        """Return the names of values that seem to have changed since the last commit.

        Weights and moments are not read.
        """
        found = [_WEIGHT] if self.weights_have_signs else []
        for handler in self._handlers.values():
            found += handler.changed()
        return found

    def changed_attributes(self) -> list[str]:
        """Return the plain attributes of modules and optimizers that have changed since the last commit."""
        return [name for handler in self._handlers.values() for name in handler.changed_attributes()]

    @property
    def weights_have_signs(self) -> bool:
        """Whether a weight shows signs of a change: a new version or memory, or a use of its ``.data``."""
        return self._uses.are_any or self._versions != self._present_versions() or self._places != self._addresses()

    @property
    def weights_were_written(self) -> bool:
        """Whether a weight is known to have been written to, moved or replaced since the commit."""
        has_moved = self._versions != self._present_versions() or self._places != self._addresses()
        return has_moved or self._uses.have_changed()

    def weights_differ(self, before: int | None) -> bool | None:
        """Compare the weights that show signs of a change with the commit; return None if the result is unknown.

        Args:
            before: the commit's digest, if it was taken.
        """
        if before is not None:
            return self.digest() != before
        if self._newest is not None:
            kept = self._newest
            return not all(same(one.contents(), kept[name]) for name, one in self._handlers.items() if one.stepped())
        if self._versions == self._present_versions():
            return self._uses.have_changed() or self._places != self._addresses()
        return None

    def versions(self) -> tuple[list[int], bool]:
        """Return the weights' version counters, and whether a counter has increased by exactly 1 since the commit.

        If a weight was swapped out and put back, its counter has increased by 2.
        """
        now = self._present_versions()
        return now, any(one == before + 1 for one, before in zip(now, self._versions, strict=False))

    def digest(self) -> int:
        """Return a digest of the weights."""
        digest = xxhash.xxh3_64()
        for weight in self._weights:
            digest.update(snapshot.bytes_of(torch_private.data_of(local(weight.tensor))))
        return digest.intdigest()

    def stepped(self) -> None:
        """Record that an optimizer has completed a step."""
        self.is_in_step = False

    def copy_from_now_on(self) -> None:
        """Copy every commit from now on, because the live tensors may already have changed when a failure occurs.

        The current commit is copied too, if the live tensors still equal it.
        """
        if not self.copies and self.point is not None and self._is_live() and not self._uses.have_changed():
            self._copy()
        self.copies = True

    def hold_copy(self, *, on: bool) -> None:
        """Copy commits to host memory from the next one on, or stop copying and free the memory.

        Call this while the current state is a commit or is about to become one.
        """
        self.holds_copy = on
        if not on and not self.copies:
            self._buffer, self._newest = {}, None

    def remember(self, point: Point) -> None:
        """Remember the current state as the commit ``point``."""
        try:
            for handler in self._handlers.values():
                handler.remember()
            if self.copies or self.holds_copy:
                self._copy()
        except BaseException:
            self.forget()  # a mix of this commit and the last is not a valid commit
            raise
        self._follow([handler.stepped() for handler in self._handlers.values()])
        self._versions, self._places = self._present_versions(), self._addresses()
        self._is_stepping = self.is_in_step = self.is_saved = False
        self.point = point
        self._uses.begin()
        self._after.begin()

    def _follow(self, stepped: list[Sequence[torch.Tensor]]) -> None:
        """Watch these tensors for changes, unless they are already watched."""
        if len(stepped) == len(self._stepped) and all(map(operator.is_, stepped, self._stepped)):
            return
        self._stepped = stepped
        here = (tensor for some in stepped for tensor in some if not is_without_memory(tensor))
        self._weights = [_Weight(tensor, self, self._uses) for tensor in here]
        for weight in self._weights:
            _watch(weight)

    def _copy(self) -> None:
        self._newest = None  # until every value is the new commit's
        for name, handler in self._handlers.items():
            contents = handler.contents() if self.copies else _on_host(handler.contents())
            self._buffer[name] = copied_tree(contents, self._buffer.get(name))
        self._newest = self._buffer

    def forget(self) -> None:
        """Record that the current values are not a valid commit."""
        self.point = self._newest = None

    @property
    def copy(self) -> Mapping[str, Any] | None:
        """The contents of the last commit by name, if it was copied; read-only."""
        return self._newest

    def at_rest(self, point: Point) -> Sequence[torch.Tensor]:
        """Return the tensors that remain this commit's until the next step; empty if one may have changed since."""
        if self.point != point or self._uses.are_any or not self._is_live():
            return ()
        return [torch_private.data_of(local(weight.tensor)) for weight in self._weights]

    @property
    def is_exposed(self) -> bool:
        """Whether the last commit exists only in the live weights."""
        return self.point is not None and not self.copies and not self._is_stepping

    @property
    def is_held(self) -> bool:
        """Whether ``recall`` can restore the last commit completely."""
        return self.point is not None and (self._newest is not None or self._is_live())

    @property
    def is_unchanged(self) -> bool:
        """Whether every value of the state equals the last commit's; compares all of them."""
        if self.point is None or not self._is_live() or self._uses.have_changed():
            return False
        if any(handler.has_changed() for handler in self._handlers.values()):
            return False
        newest = self._newest
        return newest is None or all(same(one.contents(), newest[name]) for name, one in self._handlers.items())

    def undo(self) -> None:
        """Undo changes to the structure of objects since the last commit, even if their values cannot be restored."""
        for handler in self._handlers.values():
            handler.undo()
        self._uses.move_home()

    def recall(self) -> Point | None:
        """Restore the last commit and return its point, or None if the commit is not completely in memory."""
        self.undo()
        if not self.is_held:
            return None
        if self._newest is not None:  # restored even if no change is visible
            for name, handler in self._handlers.items():
                handler.load_back(self._newest[name])
        else:
            self._uses.put_back()
        for handler in self._handlers.values():
            handler.recall()
        self._versions, self._places = self._present_versions(), self._addresses()
        self._is_stepping = self.is_in_step = False
        self._uses.begin()
        self._after.begin()
        return self.point

    def _is_live(self) -> bool:
        """Return whether the tensors without a copy still equal the last commit."""
        return (
            not self._is_stepping
            and self._versions == self._present_versions()
            and self._places == self._addresses()
            and not any(handler.tensors_changed() for handler in self._handlers.values())
        )

    def _present_versions(self) -> list[int]:
        """Return the tensors' version counters, which also count changes made by hand."""
        return torch_private.versions_of([weight.tensor for weight in self._weights])

    def _addresses(self) -> list[int]:
        return [weight.tensor.data_ptr() for weight in self._weights if weight.is_plain]


@dataclass(frozen=True, slots=True)
class _Change:
    """A change to the state between a commit and the end of the loop's iteration.

    Attributes:
        line: the line that made the change, or the commit's line.
        names: names of the changed values.
        digest: digest of the commit's weights, if it was computed.
        versions: the weights' versions.
        is_written_once: whether a weight was changed in place exactly once.
    """

    line: str
    names: list[str]
    digest: int | None
    versions: list[int]
    is_written_once: bool


class _AfterCommit:
    """Finds changes that a loop makes after its commit and does not undo before the next step.

    Weights are hashed before a new line of the loop runs for the first time, and at commits that are saved. At other
    commits, a known line may begin to write to weights. If it writes to a weight once, the weights have changed. If it
    writes to each of them twice, they may have been swapped for an evaluation, so the next commits are hashed. After
    that, only commits at which the line is expected to write again are hashed, at growing intervals as long as the line
    restores the weights.

    Args:
        commit: the last commit.
    """

    def __init__(self, commit: LastCommit) -> None:
        self._commit = commit
        self._places: dict[tuple[CodeType, int], Instruction] = {}
        self._known: Lines = set()
        self._hashed = 0  # number of commits that are still to be hashed
        self._number = 0  # number of the current commit
        # The last commit after which weights were written, and its distance from the one before.
        self._written_at = self._interval = 0
        self._hashed_at = 0  # number of the next commit to hash because the line is expected to write again
        self._writes_between = 1  # how many times the line may write unexamined before that
        self._puts_back = False  # whether the loop was seen to write to weights and restore them
        self._has_warned = False
        self._followed: RestOfTurn | None = None
        self._digest: int | None = None
        self._commit_line = ""
        self._present: Instruction | None = None
        self._assigned: dict[str, str] = {}  # the line of an attribute's first assignment
        self._told: set[str] = set()  # plain attributes that were reported
        self._change: _Change | None = None

    def _instruction(self, frame: FrameType) -> Instruction:
        """Return the frame's current instruction.

        Cached, because disassembling a function takes longer than a commit.
        """
        key = (frame.f_code, frame.f_lasti)
        if key not in self._places:
            self._places[key] = Instruction.present(frame)
        return self._places[key]

    def begin(self) -> None:
        """Begin: the current state is a commit."""
        self.stop()
        self._digest = self._change = None
        self._assigned.clear()

    def stop(self) -> None:
        """Stop looking for changes, because a step begins.

        If the step belongs to the same iteration as the commit, the loop commits at the start of an iteration, as
        Horovod's example does. A recovery then repeats the entire iteration.
        """
        if self._followed is not None:
            self._followed.stop()
        self._followed = self._present = None

    def follow(self, frame: FrameType) -> None:
        """Follow the frame that has called ``commit()``."""
        self.begin()
        frames = to_loop(frame, self._instruction)
        if not frames or not RestOfTurn.is_possible():
            return
        self._present = frames[0][1]
        self._commit_line = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        self._number += 1
        if self._hashed or self._commit.is_saved or self._number == self._hashed_at:
            self._hashed = max(0, self._hashed - 1)
            self._digest = self._commit.digest()
        self._followed = RestOfTurn(frames, self._known, self)

    def assigned(self, name: str) -> None:
        """Record that the script has assigned an attribute of the state."""
        if self._present is not None and name not in self._assigned:
            self._assigned[name] = line_after(self._present)

    # ---- called for the iteration that is followed

    def has_changed(self) -> bool:
        """Return whether anything has changed, as :meth:`TurnWatcher.has_changed`."""
        return bool(self._commit.changes())

    def new_line_comes(self) -> None:
        """Handle a new line, as :meth:`TurnWatcher.new_line_comes`."""
        if self._digest is None and not self._commit.weights_have_signs:
            self._digest = self._commit.digest()

    def turn_ends(self, line: str) -> None:
        """Compare values at the end of the loop's iteration, as :meth:`TurnWatcher.turn_ends`."""
        self._tell_of_attributes()
        names = self._commit.changes()
        if _WEIGHT in names:
            self._interval, self._written_at = self._number - self._written_at, self._number
            if self._commit.weights_differ(self._digest) is False:
                names.remove(_WEIGHT)
                self._puts_back, self._hashed = True, 0
                self._writes_between *= 2 if self._number == self._hashed_at else 1
        if not names:
            return
        line = line or next((self._assigned[one] for one in names if self._assigned.get(one)), self._commit_line)
        versions, is_written_once = self._commit.versions()
        self._change = _Change(line, names, self._digest, versions, is_written_once)

    def _tell_of_attributes(self) -> None:
        """Warn about changed plain attributes. This is not an error, because later steps may not read them."""
        names = [name for name in self._commit.changed_attributes() if name not in self._told]
        if names:
            self._told.update(names)
            log.warn(
                f"{self._commit_line}: {' and '.join(names)} changed after this commit, in the same loop: a recovery "
                "at that commit would not repeat the change. Fix: change it before state.commit() if a later step "
                "reads it"
            )

    def lasting_change(self, *, at_end: bool) -> tuple[str, str] | None:
        """Return the line and name of a change in the last iteration that was not undone, or None.

        Args:
            at_end: whether the training function has returned; modes no longer matter then.
        """
        if at_end and self._followed is not None:
            self._followed.end()
        change, self._change = self._change, None
        if change is None:
            return None
        now = self._commit.changes()
        names = [
            one
            for one in change.names
            if one in now
            and (one != _WEIGHT or self._weights_have_changed(change))
            and not (at_end and one.startswith(MODE))
        ]
        return (change.line, " and ".join(names)) if names else None

    def _weights_have_changed(self, change: _Change) -> bool:
        differ = self._commit.weights_differ(change.digest)
        if differ is not None:
            return differ
        if self._hashed_at <= self._number:
            self._hashed_at = self._number + self._interval * self._writes_between
        if not self._puts_back:
            if change.is_written_once and self._commit.versions()[0] == change.versions:
                return True
            if not self._has_warned:
                self._hashed = _LOOKED_AT
            self._warn()
        return False

    def _warn(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warn(
                f"{self._commit_line}: weights were written to between this commit and the loop's next turn. If they "
                "were not put back, a recovery at that commit would lose the change, and the final weights would "
                "differ from those of a run without a loss. Fix: change weights before state.commit()"
            )


def _on_host(tree: Any) -> Any:
    """Return the nested structure with device tensors copied to the CPU. CPU tensors are not copied."""
    if isinstance(tree, torch.Tensor):
        return tree if tree.is_cpu else tree.detach().to("cpu")
    items = value_trees.children(tree)
    return tree if items is None else value_trees.rebuilt(tree, [(key, _on_host(item)) for key, item in items])
