"""One process of a forming group: ``ours``, or ``plain`` with ``init_process_group("env://")``.

Both import everything, wait until their standard input is closed, form, sum one float, and stay until they are ended
from outside.
"""

from __future__ import annotations

import signal
import sys
from typing import Any

import torch

# A worker imports these while it waits for its seat; imports must not be measured here.
import torch._dynamo
import torch.distributed as dist

import samebits
from benchmarks.moments import Notebook, before_and_after
from samebits.core.messages import Register
from samebits.net.client import Client
from samebits.service.agent import Agent
from samebits.training.elastic import TorchState, run
from samebits.training.group.group import Group


def main() -> None:
    torch.set_num_threads(1)
    notebook = Notebook.from_environment()
    form = {"ours": form_ours, "plain": form_plain}[sys.argv[1]]
    form(notebook)
    signal.pause()


def form_ours(notebook: Notebook) -> None:
    """Run a worker with an empty state; the group is used once it is formed, before its state is made equal."""

    def registered(_: Client, message: object) -> None:
        if isinstance(message, Register):
            notebook.note("registers")

    def formed(group: Group) -> None:
        if group.world_size > 1:
            notebook.note("formed")
            _add_up(group.world_size)
            notebook.note("ready")

    before_and_after(Client, "send", registered, _nothing)
    before_and_after(Agent, "register", _nothing, lambda *_, **__: notebook.note("seated"))
    before_and_after(Agent, "enter", lambda *_, **__: notebook.note("enters"), lambda *_, **__: notebook.note("placed"))
    before_and_after(Group, "form", _nothing, formed)
    _wait_at_the_barrier(notebook)

    notebook.note("begins")
    samebits.init()

    @run
    def train(_: TorchState) -> None:
        notebook.note("trains")
        signal.pause()

    train(TorchState())


def form_plain(notebook: Notebook) -> None:
    """Form a group as a script does under torchrun, or with the variables set by hand; rank 0 serves the TCPStore."""
    _wait_at_the_barrier(notebook)

    notebook.note("begins")
    dist.init_process_group("gloo", init_method="env://")
    notebook.note("formed")
    _add_up(dist.get_world_size())
    notebook.note("ready")


def _wait_at_the_barrier(notebook: Notebook) -> None:
    notebook.note("waits")
    sys.stdin.read()


def _add_up(world_size: int) -> None:
    one = torch.ones(1)
    dist.all_reduce(one)
    if one.item() != world_size:
        raise AssertionError(f"the sum of ones over {world_size} ranks is {one.item()}")


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing, as the unused side of a probe."""


if __name__ == "__main__":
    main()
