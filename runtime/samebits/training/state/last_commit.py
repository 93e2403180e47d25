"""Keep the last commit in this process's memory at little cost, and restore it.

Until an optimizer begins its next step, weights and moments *are* the last commit. So a commit after every step copies
only what a forward pass or the user's loop changes. With several steps between two commits, the tensors are copied too,
into the older of two buffers, so that one complete commit exists at any moment.

A weight may change in the meantime, for example when an evaluation swaps in an average. A change in place increases the
tensor's version, and the commit is then taken from elsewhere. A change through ``.data`` does not. So a weight is
copied when a script reads its ``.data`` between a commit and the next step, before it can be written to, and a weight
whose ``.data`` is set gets its own memory back. Scripts that use neither pay nothing.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Mapping, Sequence
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
from samebits.training.sharding.pieces import local
from samebits.training.state import snapshot
from samebits.training.state.handlers import StateHandler, copied_tree, same
from samebits.training.state.module_state import are_alike
from samebits.training.state.script.after_commit import Instruction, RestOfTurn, line_after, to_loop

__all__ = ["LastCommit"]


_MANY_ALIASES = 8
_LOOKED_AT = 4
"""A loop that changes weights after its commit mostly does so after each of its first commits."""
_LOOKED_AT_LATER = 128
"""Commits to follow once weights have changed between a later commit and the next step."""


class _Uses:
    """The weights whose ``.data`` a script has used since the last commit.

    Attributes:
        count: of all uses.
    """

    def __init__(self) -> None:
        self.count = 0
        self._commit: Instruction | None = None
        self._used: dict[int, _Weight] = {}
        self._line_after = ""  # of the first use that a recovery at the last commit does not repeat
        self._is_used_ahead = False  # in the next turn of the loop, which a recovery repeats
        self._has_told = False

    def is_committed_at(self, commit: Instruction) -> None:
        """Note that the script calls ``commit()`` there."""
        self._commit = commit

    def add(self, weight: _Weight) -> None:
        """Note that a script uses this weight's ``.data``."""
        self.count += 1
        line = "" if self._commit is None else line_after(self._commit)
        self._line_after = self._line_after or line
        self._is_used_ahead = self._is_used_ahead or not line
        self._used[id(weight)] = weight

    def begin(self) -> None:
        """Begin a new commit with the current weights."""
        self._used = {key: one for key, one in self._used.items() if one.committed()}
        self._line_after, self._is_used_ahead = "", False

    def change_after(self) -> str:
        """Return the line after the commit that has changed a weight, once the loop's next turn has begun.

        Empty also if a weight was used in that turn as well, which may have changed it.
        """
        if not self._line_after or self._is_used_ahead:
            return ""
        is_next_turn = self._commit is not None and not line_after(self._commit)
        return self._line_after if is_next_turn and self.have_changed() else ""

    @property
    def are_any(self) -> bool:
        """Whether an alias may have changed a weight since the last commit."""
        return bool(self._used)

    def assigned(self) -> None:
        """Warn, once, that a script gives a weight other memory."""
        if not self._has_told:
            self._has_told = True
            log.warn(
                f"{calling_place()}: a weight of the state is given another tensor's memory (parameter.data = …) "
                "between two commits. After a loss it gets its own memory back, but what shares memory at a commit is "
                "two tensors in a replacement. Fix: parameter.copy_(…) under torch.no_grad()"
            )

    def have_changed(self) -> bool:
        """Return whether any of them is known to differ from the last commit."""
        return any(one.is_changed for one in self._used.values())

    def move_home(self) -> None:
        """Give each weight the memory that it had at the last commit."""
        for weight in self._used.values():
            weight.move_home()

    def put_back(self) -> None:
        """Restore each weight's values of the last commit."""
        for weight in self._used.values():
            weight.put_back()


class _Weight:
    """One weight of a commit, and how its ``.data`` was used since.

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
        self._aliases: list[weakref.ref[torch.Tensor]] = []  # may still be written to
        self._copy: torch.Tensor | None = None
        self._is_copied = False  # since the last commit
        self._home: torch.Tensor | None = None  # the memory it had at the last commit, if a script replaced it

    def was_read(self, alias: torch.Tensor) -> None:
        """Note that a script now has this alias."""
        if self._commit.is_in_step or not self._commit.is_running:
            return  # an optimizer changes it this way itself, or no training runs
        if len(self._aliases) >= _MANY_ALIASES:
            self._aliases = self._alive()
        self._aliases.append(weakref.ref(alias))
        self._uses.add(self)
        if self._commit.is_exposed:
            self._copy_aside()

    def is_assigned(self) -> None:
        """Note that a script is about to set its ``.data``."""
        commit = self._commit
        if commit.is_in_step or not commit.is_running or commit.point is None or not self.is_plain:
            return  # FSDP2's parameters front another object, so setting their data changes nothing
        if self._home is None:
            self._home = torch_private.data_of(self.tensor)
        self._uses.add(self)
        self._uses.assigned()

    def committed(self) -> bool:
        """Begin a new commit; return whether an alias can still change the weight unnoticed."""
        self._home, self._is_copied, self._aliases = None, False, self._alive()
        if self._aliases and self._commit.is_exposed:
            self._copy_aside()
        return bool(self._aliases)

    def move_home(self) -> None:
        """Give the weight the memory that it had at the last commit."""
        if self._home is not None:
            torch_private.give_data(self.tensor, self._home)
            self._home = None

    @property
    def is_changed(self) -> bool:
        """Whether it is known to differ from the last commit."""
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
        """Return this rank's memory of the weight, outside autograd and version counting."""
        return torch_private.data_of(local(self.tensor))

    def _alive(self) -> list[weakref.ref[torch.Tensor]]:
        return [one for one in self._aliases if torch_private.is_alive(one)]


_watched: dict[int, weakref.ref[_Weight]] = {}
"""Weights of all states by their tensor's id, which may belong to a new tensor once the state is gone."""


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
    """Remember commits, tell whether the last one can be restored, and restore it.

    Args:
        handlers: of everything in the state, by name.

    Attributes:
        point: the last commit; None if there is none.
        copies: whether every commit is copied.
        holds_copy: whether each commit is copied to the host for now; set by :meth:`hold_copy`.
        is_in_step: an optimizer's ``step`` is running.
        is_running: a training function runs with the state, so that a loss is possible.
    """

    def __init__(self, handlers: Mapping[str, StateHandler]) -> None:
        self.point: Point | None = None
        self.copies = False
        self.holds_copy = False
        self.is_in_step = False
        self.is_running = False
        self._handlers = handlers
        self._slots: list[dict[str, Any]] = [{}, {}]
        self._newest: dict[str, Any] | None = None  # the slot with the commit of ``point``
        self._is_stepping = False  # an optimizer has begun a step since
        self._stepped: list[Sequence[torch.Tensor]] = []  # the tensors that are not copied, by handler
        self._weights: list[_Weight] = []
        self._versions = 0
        self._places: list[int] = []
        self._uses = _Uses()
        self._after = _AfterCommit(self)

    def begins_in(self, frame: FrameType) -> None:
        """Note that the script calls ``commit()`` in this frame."""
        self._uses.is_committed_at(self._after.present(frame))

    def is_made_in(self, frame: FrameType) -> None:
        """``commit()`` is about to return to this frame: see whether its loop changes weights after it."""
        self._after.follow(frame)

    def stepping(self) -> None:
        """An optimizer begins a step: from now on the live tensors are no commit.

        Raises:
            HiddenStateError: weights were changed after the commit, in its loop.
        """
        if not self._is_stepping and self.point is not None:
            self.require_unchanged_since_commit()
            self._after.end()
        self._is_stepping = self.is_in_step = True

    def require_unchanged_since_commit(self) -> None:
        """The loop's next turn, or what follows the loop, begins.

        Raises:
            HiddenStateError: weights were changed after the commit, in its loop, where no recovery repeats that.
        """
        line = self._after.line
        if not line and (used := self._uses.change_after()) and self._versions == self._sum_of_versions():
            line = used  # else an operation in place may have changed them in the next turn
        if line:
            raise HiddenStateError(
                f"{line}: a weight is changed after state.commit(), in the same loop. A recovery at that commit does "
                "not repeat the change, so the final weights would differ from those of a run without a loss. Fix: "
                "change weights before state.commit()"
            )

    def uses(self) -> tuple[int, list[int], int]:
        """Return what differs if a weight may have been changed: by an operation in place, or through its ``.data``."""
        return self._sum_of_versions(), self._addresses(), self._uses.count

    def digest(self) -> int:
        """Return a digest of the weights."""
        digest = xxhash.xxh3_64()
        for weight in self._weights:
            digest.update(snapshot.bytes_of(torch_private.data_of(local(weight.tensor))))
        return digest.intdigest()

    @property
    def has_aliases(self) -> bool:
        """Whether a tensor of the script's may have changed a weight since the last commit, without a trace."""
        return self._uses.are_any

    def stepped(self) -> None:
        """Note that an optimizer has ended a step."""
        self.is_in_step = False

    def copy_from_now_on(self) -> None:
        """Copy every commit from now on, since a failure may find the live tensors changed.

        The current commit is copied too, if the live tensors still are what was committed.
        """
        if not self.copies and self.point is not None and self._is_live() and not self._uses.have_changed():
            self._copy()
        self.copies = True

    def hold_copy(self, *, on: bool) -> None:
        """Copy commits to the host's memory from the next one on, or stop and free the copies.

        Call it while the current state is, or is about to be, a commit.
        """
        self.holds_copy = on
        if not on and not self.copies:
            self._slots, self._newest = [{}, {}], None

    def remember(self, point: Point) -> None:
        """Remember the current state as the commit ``point``."""
        try:
            for handler in self._handlers.values():
                handler.remember()
            if self.copies or self.holds_copy:
                self._copy()
        except BaseException:
            self.forget()  # a mix of this commit and the last is neither
            raise
        self._follow([handler.stepped() for handler in self._handlers.values()])
        self._versions, self._places = self._sum_of_versions(), self._addresses()
        self._is_stepping = self.is_in_step = False
        self.point = point
        self._uses.begin()
        self._after.begin()

    def _follow(self, stepped: list[Sequence[torch.Tensor]]) -> None:
        """Watch these tensors, if they are not the same as last time."""
        if len(stepped) == len(self._stepped) and all(map(operator.is_, stepped, self._stepped)):
            return
        self._stepped = stepped
        self._weights = [_Weight(tensor, self, self._uses) for some in stepped for tensor in some]
        for weight in self._weights:
            _watch(weight)

    def _copy(self) -> None:
        spare = self._slots[0] if self._newest is not self._slots[0] else self._slots[1]
        for name, handler in self._handlers.items():
            contents = handler.contents() if self.copies else _on_host(handler.contents())
            spare[name] = copied_tree(contents, spare.get(name))
        self._newest = spare

    def forget(self) -> None:
        """Mark the current values as no valid commit."""
        self.point = self._newest = None

    @property
    def copy(self) -> Mapping[str, Any] | None:
        """The contents of the last commit by name, if they were copied; not to be changed."""
        return self._newest

    @property
    def is_exposed(self) -> bool:
        """Whether the live weights are the only copy of the last commit."""
        return self.point is not None and not self.copies and not self._is_stepping

    @property
    def is_held(self) -> bool:
        """Whether ``recall`` can restore it completely."""
        return self.point is not None and (self._newest is not None or self._is_live())

    @property
    def is_unchanged(self) -> bool:
        """Whether the state as it stands is the last commit in every value; compares them all."""
        if self.point is None or not self._is_live() or self._uses.have_changed():
            return False
        if any(handler.has_changed() for handler in self._handlers.values()):
            return False
        newest = self._newest
        return newest is None or all(same(one.contents(), newest[name]) for name, one in self._handlers.items())

    def undo(self) -> None:
        """Undo changes to the objects since the last commit, whether or not their values can be restored."""
        for handler in self._handlers.values():
            handler.undo()
        self._uses.move_home()

    def recall(self) -> Point | None:
        """Restore the last commit and return its point; None if memory does not hold all of it."""
        self.undo()
        if not self.is_held:
            return None
        if self._newest is not None:  # even if no change is visible
            for name, handler in self._handlers.items():
                handler.load_back(self._newest[name])
        else:
            self._uses.put_back()
        for handler in self._handlers.values():
            handler.recall()
        self._versions, self._places = self._sum_of_versions(), self._addresses()
        self._is_stepping = self.is_in_step = False
        self._uses.begin()
        self._after.begin()
        return self.point

    def _is_live(self) -> bool:
        """Return whether the uncopied tensors are the last commit's, except for those copied through ``.data``."""
        return not self._is_stepping and self._versions == self._sum_of_versions() and self._places == self._addresses()

    def _sum_of_versions(self) -> int:
        """Return a number that grows with every change in place, also those made by hand."""
        return sum(torch_private.version_of(weight.tensor) for weight in self._weights)

    def _addresses(self) -> list[int]:
        return [weight.tensor.data_ptr() for weight in self._weights if weight.is_plain]


class _AfterCommit:
    """Finds weights that a loop changes after its commit; a recovery at that commit does not repeat the change.

    The first commits are followed line by line. A loop may also change weights now and then: if they have changed
    between a later commit and the next step, the commits after it are followed.

    Args:
        commit: the last one.

    Attributes:
        line: that was found to change a weight; empty if none was.
    """

    def __init__(self, commit: LastCommit) -> None:
        self.line = ""
        self._commit = commit
        self._known: dict[tuple[CodeType, int], Instruction] = {}
        self._looks = _LOOKED_AT
        self._later = 0  # changes between a commit and a step that were not followed
        self._followed: RestOfTurn | None = None
        self._uses: object = None  # at the last commit, if its loop runs more after it
        self._commit_line = ""

    def present(self, frame: FrameType) -> Instruction:
        """Return the instruction that the frame is at; taking a function apart takes longer than a commit."""
        key = (frame.f_code, frame.f_lasti)
        if key not in self._known:
            self._known[key] = Instruction.present(frame)
        return self._known[key]

    def begin(self) -> None:
        """The weights as they stand are a commit."""
        self._stop()
        self._uses = None

    def follow(self, frame: FrameType) -> None:
        """``commit()`` is about to return to this frame."""
        self.begin()
        frames = to_loop(frame, self.present)
        if not frames:
            return
        commit = self._commit
        self._uses = commit.uses()
        self._commit_line = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        if self._looks and RestOfTurn.is_possible():
            self._looks -= 1
            before = commit.digest()
            self._followed = RestOfTurn(frames, commit.uses, lambda line: self._turn_ended(line, before))

    def _stop(self) -> None:
        if self._followed is not None:
            self._followed.stop()
            self._followed = None

    def _turn_ended(self, line: str, before: int) -> None:
        commit = self._commit
        if line or commit.has_aliases:
            if commit.digest() != before:
                self.line = line or self._commit_line
            else:
                self._looks, self._later = 0, 2  # swapped and swapped back: that is right

    def end(self) -> None:
        """Note that an optimizer begins the first step after the commit, with no change found before it."""
        is_followed = self._followed is not None
        self._stop()
        before, self._uses = self._uses, None
        if before is None or self._later > 1 or self._commit.uses() == before:
            return
        if is_followed:
            self._looks, self._later = 0, 2  # changed in the turn of the step, which a recovery repeats
            return
        self._later += 1
        if self._later == 1:
            self._looks = _LOOKED_AT_LATER
        else:
            log.warn(
                f"{self._commit_line}: weights sometimes change between this commit and the next step. A recovery at "
                "that commit does not repeat what the loop changes after it, so the final weights may differ from "
                "those of a run without a loss. Fix: change weights before state.commit()"
            )


def _on_host(tree: Any) -> Any:
    """Return the tree with tensors on a device copied to the CPU; the others stay the same objects."""
    if isinstance(tree, torch.Tensor):
        return tree if tree.is_cpu else tree.detach().to("cpu")
    items = value_trees.children(tree)
    return tree if items is None else value_trees.rebuilt(tree, [(key, _on_host(item)) for key, item in items])
