"""Process groups whose collectives can be abandoned, even while gloo is stuck.

:class:`BreakableGroup` serves the user's ``dist.*`` calls, DDP's broadcasts and subgroups; :class:`ReducerGroup` serves
DDP's reducer. Their works obey a :class:`~samebits.training.group.breaker.Breaker`. gloo does not wake the receiver of
a message that was cut off half-way (its pair drops the buffer from its notification list), so a thread that waits
inside gloo may stay there until gloo's timeout of half an hour. Therefore collectives are awaited in short slices,
which cost nothing while they succeed, and futures are completed by gloo or the breaker. A work that gloo allows to be
awaited only once is awaited by a helper thread that can be abandoned.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import c10d_logger, distributed_c10d

from samebits.errors import UsageError
from samebits.training import torch_private
from samebits.training.group.breakable_works import (
    NO_TIMEOUT,
    Collective,
    InFlight,
    Pairwise,
    ReduceScatter,
    Several,
    await_this_thread_at_exit,
    wait_in_slices,
)
from samebits.training.group.breaker import Breaker, run_breakable
from samebits.training.group.calling_place import TORCH_FOLDER, calling_place
from samebits.training.group.recorder import Recorder

__all__ = ["BreakableGroup", "ReducerGroup"]

COLLECTIVE_ALONE = (
    "a collective {when} samebits.elastic.run would run in this process alone. Fix: move the call into the function "
    "that elastic.run calls"
)
_MANY = 8  # works in flight above which finished works are removed
_NO_BACKWARD = -1


Subgroup = Callable[[list[int], timedelta, str, str], dist.ProcessGroup | None]
"""Makes a subgroup from the parent's ranks, a timeout, and torch's group name and description.

Returns None on ranks outside the subgroup.
"""


class BreakableGroup(dist.ProcessGroup):
    """A process group that forwards to ``inner`` and returns works that can be interrupted.

    It is ``dist.group.WORLD`` and ``ddp.process_group``. C++ callers (DDP's reducer, buffer broadcasts, functional
    collectives) reach the methods below through torch's trampolines, so they are covered too.

    Args:
        inner: the plain group; its backend must be gloo.
        breaker: the switch that its works obey.
        timeout: timeout of a send or receive whose caller gives none.
        subgroup: makes a group of some of the ranks, for ``dist.new_group``.
        alone: if given, the script's own ``dist.*`` calls are refused; returns ``before`` or ``after``, the side of
            training that the process is on.
        recorder: records the newest launches.

    Attributes:
        breaker: the breaker that was passed in.
        launched: gloo's own works that may still be running.
        count: number of collectives launched so far.
    """

    def __init__(
        self,
        inner: dist.ProcessGroup,
        breaker: Breaker,
        timeout: timedelta,
        subgroup: Subgroup,
        alone: Callable[[], str] | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        # Python subclasses can use only this one of torch's two constructors, and the stubs lack it.
        initialize: Any = super().__init__
        initialize(inner.rank(), inner.size())
        self._inner: Any = inner
        self.breaker = breaker
        self._timeout = timeout
        self._subgroup = subgroup
        self._alone = alone
        self.recorder = recorder or Recorder(None, "", "", ())
        self.launched = InFlight(self.recorder)
        self.count = 0

    def unfinished(self) -> list[dist.Work]:
        """Return gloo's works that are still running. They must end before gloo's mesh is freed."""
        return self.launched.unfinished()

    def collective(self, name: str, *args: Any, **kwargs: Any) -> dist.Work:
        """Launch a collective of ``inner`` by its method name."""
        work = self._launch(name, *args, **kwargs)
        self.count += 1
        if len(self.launched) >= _MANY:  # some works are never waited for
            self.launched.let_go()
        self.launched.add(work, self.recorder.launched(name, self.count, args))
        return Collective(work, self.breaker, self.launched)

    def reduce_scatter_by(self, name: str, outputs: Any, inputs: Any, options: Any = None) -> dist.Work:
        """Launch a reduce-scatter of ``inner`` by its method name, as all-reduces, which is how gloo implements it.

        Args:
            name: the method's name.
            outputs, inputs: one tensor each, or a list of tensors; an input may be a list with a part for each rank.
            options: torch's options with the operation; None: sum.

        Raises:
            RuntimeError: an input's element count differs from that of all ranks' outputs.
        """
        how = dist.AllreduceOptions()
        if options is not None:
            how.reduceOp, how.timeout = options.reduceOp, options.timeout
        pairs = zip(outputs, inputs, strict=True) if isinstance(outputs, list) else [(outputs, inputs)]
        self.count += 1
        if len(self.launched) >= _MANY:
            self.launched.let_go()
        number, works = self.recorder.launched(name, self.count, (outputs, inputs)), []
        for output, given in pairs:
            parts = list(given) if isinstance(given, list | tuple) else [given]
            wanted, found = output.numel() * self.size(), sum(one.numel() for one in parts)
            if wanted != found:
                raise RuntimeError(
                    f"reduce_scatter: an output of {output.numel()} elements on {self.size()} ranks needs an input of "
                    f"{wanted}, not {found}"
                )
            for index, part in enumerate(parts):
                reduced = part.clone(memory_format=torch.contiguous_format)
                work = self._launch("allreduce", [reduced], how)
                self.launched.add(work, number)
                number = None
                if len(parts) > 1 and index != self.rank():
                    works.append(Collective(work, self.breaker, self.launched))
                else:
                    at = 0 if len(parts) > 1 else self.rank()
                    works.append(ReduceScatter(work, self.breaker, self.launched, reduced, output, at))
        return works[0] if len(works) == 1 else Several(works)

    def pairwise(self, name: str, tensors: list[torch.Tensor], *args: Any, **kwargs: Any) -> dist.Work:
        """Launch a send or receive of ``inner`` by its method name.

        For a send or receive, gloo accesses the tensor's memory from the host, even if the tensor is on an accelerator.
        An accelerator tensor is therefore sent from a copy in host memory, and received into one, which the work's
        ``wait`` copies to the device.
        """
        sends = name == "send"
        copies = [one if one.is_cpu else one.cpu() if sends else torch.empty_like(one, device="cpu") for one in tensors]
        work = self._launch(name, copies, *args, **kwargs)
        number = self.recorder.launched_pairwise(name, (tensors, *args))
        arrived = [] if sends else [pair for pair in zip(tensors, copies, strict=True) if not pair[0].is_cpu]
        ended = functools.partial(self._ended_pairwise, work, number, name == "recv_anysource", arrived)
        return Pairwise(work, self.breaker, self._timeout, ended)

    def _ended_pairwise(
        self, work: dist.Work, number: int | None, from_anybody: bool, arrived: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        for tensor, copy in arrived:
            tensor.copy_(copy)
        if from_anybody:
            self.recorder.named_sender(number, work._source_rank())
        self.recorder.over(number)

    def _launch(self, name: str, *args: Any, **kwargs: Any) -> dist.Work:
        self.breaker.check()
        await_this_thread_at_exit()
        if self._alone is not None and _is_scripts_own(sys._getframe(3)):
            raise UsageError(f"{calling_place()}: {COLLECTIVE_ALONE.format(when=self._alone())}")
        self.breaker.before_launch(self)
        try:
            work: dist.Work = getattr(self._inner, name)(*args, **kwargs)
        except RuntimeError:
            self.breaker.check()
            raise
        return work

    def monitored_barrier(self, *args: Any, **kwargs: Any) -> None:
        """Run torch's monitored barrier in a helper thread, because it blocks inside gloo."""
        self.breaker.check()
        self.breaker.before_launch(self)
        run_breakable(self.breaker, lambda: self._inner.monitored_barrier(*args, **kwargs), "samebits-barrier")

    def new_group(
        self,
        ranks: list[int],
        *,
        timeout: timedelta,
        group_name: str,
        group_desc: str | None,
        pg_options: object,
        backend: object = None,
    ) -> dist.ProcessGroup | None:
        """Create a subgroup for ``dist.new_group``, which every rank calls; return None on ranks outside it.

        ``backend``, passed since torch 2.14, and the options are ignored: the backend is this group's.
        """
        self.breaker.check()
        if self._alone is not None:
            raise UsageError(f"{calling_place()}: {COLLECTIVE_ALONE.format(when=self._alone())}")
        return self._subgroup(ranks, timeout, group_name, group_desc or "undefined")

    def mesh(self) -> dist.ProcessGroupGloo:
        """Return the backend of ``inner``, the same for every device type."""
        backend: dist.ProcessGroupGloo = self._inner._get_backend(torch.device("cpu"))
        return backend

    def get_group_store(self) -> Store:
        """Return the store of ``inner``, because a Python subclass of ProcessGroup cannot have its own store."""
        store: Store = self._inner.get_group_store()
        return store

    def split_group(self, *args: Any, **kwargs: Any) -> dist.ProcessGroup | None:
        """Split as torch does. The new group is a plain group that ends only when its sockets are shut down."""
        group: dist.ProcessGroup | None = self._inner.split_group(*args, **kwargs)
        return group

    def merge_remote_group(self, *args: Any, **kwargs: Any) -> dist.ProcessGroup:
        """Merge as torch does. The new group is a plain group that ends only when its sockets are shut down."""
        group: dist.ProcessGroup = self._inner.merge_remote_group(*args, **kwargs)
        return group


class ReducerGroup(dist.ProcessGroup):
    """The group on which DDP's reducer launches its buckets, at a cost of a few microseconds per bucket.

    The reducer waits for its buckets in C++ at the end of the backward pass, and a bucket that gloo never completes
    would block it there forever. All buckets are therefore awaited in Python just before, so that the reducer finds
    them complete. Python runs once per bucket, to pass it to gloo without torch's dispatcher, and once per backward
    pass, to wait. No Python runs when a bucket completes.
    """

    def __init__(self, group: BreakableGroup) -> None:
        initialize: Any = super().__init__  # as in BreakableGroup
        initialize(group.rank(), group.size())
        self._group = group
        self._breaker = group.breaker
        self._launched = group.launched
        mesh: Any = group.mesh()  # its methods are missing from torch's stubs
        self._allreduce: Callable[..., dist.Work] = mesh.allreduce
        self._backward = _NO_BACKWARD  # the last pass that launched a bucket here
        self._works: list[dist.Work] = []  # the works that this pass launched

    def allreduce(self, *args: Any) -> dist.Work:
        """Launch a bucket inside a backward pass; elsewhere (``Join``) behave like the plain group."""
        backward = torch_private.current_backward()
        if backward == _NO_BACKWARD:
            return self._group.collective("allreduce", *args)
        self._breaker.check()
        if backward != self._backward:
            self._backward, self._works = backward, []
            # The reducer registers its own callback with its last bucket, so it runs after this one.
            torch_private.before_backward_ends(functools.partial(self._wait_for_all, self._works))
        self._breaker.before_launch(self._group)
        try:
            work = self._allreduce(*args)
        except RuntimeError:
            self._breaker.check()
            raise
        group = self._group
        group.count += 1
        self._launched.add(work, group.recorder.launched("allreduce", group.count, args))
        self._works.append(work)
        return work

    def _wait_for_all(self, works: list[dist.Work]) -> None:
        for work in works:
            wait_in_slices(work, self._breaker, self._launched, NO_TIMEOUT)
        works.clear()

    def broadcast(self, *args: Any) -> dist.Work:
        """Broadcast a new bucket layout."""
        return self._group.collective("broadcast", *args)

    def getBackendName(self) -> str:
        """Return the name shown in torch's logs."""
        return dist.Backend.GLOO


def _is_scripts_own(frame: FrameType | None) -> bool:
    """Return whether the call came through ``torch.distributed`` from the script, not from DTensor."""
    if frame is None or frame.f_code.co_filename != distributed_c10d.__file__:
        return False
    while frame is not None and frame.f_code.co_filename in _C10D:
        frame = frame.f_back
    return frame is None or not frame.f_code.co_filename.startswith(_DTENSOR)


_C10D = (distributed_c10d.__file__, c10d_logger.__file__)
_DTENSOR = f"{TORCH_FOLDER}distributed{os.sep}tensor{os.sep}"


def _method(name: str, launch: Callable[..., dist.Work]) -> Callable[..., dist.Work]:
    def method(self: BreakableGroup, *args: Any, **kwargs: Any) -> dist.Work:
        return launch(self, name, *args, **kwargs)

    method.__name__ = name
    method.__qualname__ = f"{BreakableGroup.__name__}.{name}"
    return method


for _name in torch_private.COLLECTIVES:
    _launch = BreakableGroup.reduce_scatter_by if "reduce_scatter" in _name else BreakableGroup.collective
    setattr(BreakableGroup, _name, _method(_name, _launch))
for _name in torch_private.PAIRWISE:
    setattr(BreakableGroup, _name, _method(_name, BreakableGroup.pairwise))
