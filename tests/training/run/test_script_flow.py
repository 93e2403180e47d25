"""Mistakes around ``elastic.run`` that would end silently are refused, or named with their line."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from samebits.errors import UsageError
from samebits.service import agent as agents
from samebits.service import log
from samebits.training import elastic
from samebits.training.group import ddp
from samebits.training.process import context
from samebits.training.state.data.sampler import ElasticSampler
from samebits.training.state.torch_state import TorchState


@pytest.mark.parametrize("is_async", [False, True])
def test_function_whose_call_trains_nothing_is_refused_at_its_decoration(is_async: bool) -> None:
    def yields(_: Any) -> Iterator[int]:
        yield 1

    async def awaits(_: Any) -> None:
        pass

    with pytest.raises(
        UsageError, match=r"test_script_flow\.py:\d+: samebits\.elastic\.run decorates (yields|awaits)\(\)"
    ):
        elastic.run(awaits if is_async else yields)  # type: ignore[arg-type]


def test_wrapped_model_outside_the_state_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    inside, outside = nn.Linear(1, 1), nn.Linear(2, 2)
    wrapped = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(wrapped)
    wrapped.module = inside
    monkeypatch.setattr(ddp, "wrappers", lambda: [wrapped])
    ddp.require_all_among(list(inside.parameters()))
    with pytest.raises(UsageError, match=r"DistributedDataParallel\(Linear\) trains parameters that are not in the st"):
        ddp.require_all_among(list(outside.parameters()))


def test_init_in_a_child_of_a_worker_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMEBITS_WORKER_PID", "1" if os.getppid() != 1 else "2")
    context._refuse_in_a_child()  # an environment that came another way
    monkeypatch.setenv("SAMEBITS_WORKER_PID", str(os.getppid()))
    with pytest.raises(UsageError, match=rf"not in the worker itself \(pid {os.getppid()}\).*if __name__ =="):
        context._refuse_in_a_child()


@pytest.mark.parametrize(("consumed", "kind"), [(8, UsageError), (0, UnboundLocalError)])
def test_unbound_variable_of_an_empty_loop_is_explained_with_its_line(
    consumed: int, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restore point may be the last batch of an epoch. Any other script error is left as it is."""
    monkeypatch.setattr(context, "get_rank", lambda: 0)
    monkeypatch.setattr(context, "get_world_size", lambda: 1)
    model, sampler = nn.Linear(1, 1), ElasticSampler(range(8))
    state = TorchState(model, torch.optim.SGD(model.parameters(), lr=0.1), sampler=sampler, rng="per_step")
    sampler.load_state_dict({"seed": 0, "epoch": 3, "consumed": consumed})

    def train() -> float:
        for batch in DataLoader(range(8), sampler=sampler) if consumed else ():  # type: ignore[arg-type]
            loss = float(batch)
        return loss

    with pytest.raises(kind) as found, elastic._told_of_a_complete_epoch(state):
        train()
    is_told = "after the last batch of epoch 3, so the loop over the loader had no batch left" in str(found.value)
    assert is_told is bool(consumed)
    assert str(found.value).startswith("test_script_flow.py:") is bool(consumed)


def test_thread_that_keeps_a_process_alive_after_its_script_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(log, "warn", said.append)
    ends = threading.Event()
    uploader = threading.Thread(target=lambda: ends.wait(60), name="uploader")
    uploader.start()
    agent = object.__new__(agents.Agent)
    agent._script_ended_at, agent._threads_said = None, False
    try:
        agent._look_at_threads(1.0)
        over = threading.Thread(target=lambda: None)
        monkeypatch.setattr(threading, "main_thread", lambda: over)  # one that is not alive
        for now in (10.0, 10.0 + agents.THREADS_S - 0.1):
            agent._look_at_threads(now)
        assert said == [], "a script may take a moment to end"
        for now in (20.0, 30.0):
            agent._look_at_threads(now)
    finally:
        ends.set()
        uploader.join()
    (line,) = said
    assert "'uploader' (test_script_flow.py:" in line and "daemon=True" in line
