"""Replace four functions of ``torch.distributed`` for scripts that were written for torchrun.

These functions create and destroy the default group, and return rank and world size. With recovery on, SameBits owns
the group, so creating or destroying it has no effect. Until the first generation the group has one member, and a script
that asks for its rank gets its seat's rank.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from samebits.service import log
from samebits.training.group.calling_place import caller_is_torch, calling_place, is_library


class TorchrunCalls:
    """The replacements in ``torch.distributed``, and in modules of the script that imported the functions by name.

    Args:
        seat: returns this process's rank and world size until a generation has set them, then None.
        is_spare: returns whether that rank belongs to a spare.
    """

    def __init__(self, seat: Callable[[], tuple[int, int] | None], is_spare: Callable[[], bool]) -> None:
        self._seat = seat
        self._is_spare = is_spare
        self._said: set[str] = set()

    def install(self) -> None:
        """Install the replacements. Calls from inside torch still reach torch's own functions."""
        c10d, script = distributed_c10d, list(_modules_of_the_script())
        for original, ours, places in (
            (c10d.init_process_group, self._init_process_group(c10d.init_process_group), (dist, c10d)),
            (c10d.destroy_process_group, self._destroy_process_group(c10d.destroy_process_group), (dist, c10d)),
            (c10d.get_rank, self._asked(c10d.get_rank, 0), (dist,)),
            (c10d.get_world_size, self._asked(c10d.get_world_size, 1), (dist,)),
        ):
            for module in (*places, *script):
                for name in [name for name, value in vars(module).items() if value is original]:
                    setattr(module, name, ours)

    def _init_process_group(self, original: Callable[..., None]) -> Callable[..., Any]:
        @functools.wraps(original)
        def init_process_group(*args: Any, **kwargs: Any) -> Any:
            if not dist.is_initialized():
                return original(*args, **kwargs)
            self._say("init_process_group() does nothing: samebits.init() has created the group")
            return dist.group.WORLD

        return init_process_group

    def _destroy_process_group(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def destroy_process_group(group: dist.ProcessGroup | None = None) -> None:
            if group is not None and group is not dist.group.WORLD:
                original(group)
            else:
                self._say("destroy_process_group() does nothing: SameBits destroys its groups itself")

        return destroy_process_group

    def _asked(self, original: Callable[..., int], which: int) -> Callable[..., int]:
        @functools.wraps(original)
        def asked(group: dist.ProcessGroup | None = None) -> int:
            seat = self._seat() if group is None or group is dist.group.WORLD else None
            if seat is None or caller_is_torch():
                return original(group)
            if which == 0 and self._is_spare():
                self._say(
                    f"the rank was requested in a spare, which has none yet; returned {seat[0]}, which is no "
                    "worker's rank. Fix: get it inside the function that elastic.run calls",
                    warns=True,
                )
            return seat[which]

        return asked

    def _say(self, text: str, *, warns: bool = False) -> None:
        place = calling_place()
        if f"{place}{text}" not in self._said:
            self._said.add(f"{place}{text}")
            (log.warn if warns else log.say)(f"{place}: {text}")


def _modules_of_the_script() -> Iterator[ModuleType]:
    """Yield modules that may have imported the functions by name before ``samebits.init()``."""
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(module, ModuleType) and (module.__name__ == "__main__" or (file and not is_library(file))):
            yield module
