"""The only worker of a job, with a state of a given size: saves, loads and trains on demand, in all compared ways.

``<parameter bytes> <folder> <device>``. Standard input has one command per line: ``save <way>``, ``load <way>``,
``train <way> spare|shared`` and ``end``; every answer is an event ``done`` with seconds in its text. The state has
parameters and two Adam moments in 400 tensors. SameBits' own state is a ``TorchState`` like any user's, and every way,
the floors included, saves those same tensors in this same process.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import samebits
from benchmarks.moments import Notebook
from benchmarks.processes import processes_below
from benchmarks.workers.checkpoint_ways import Way, arrive, flat, ways
from samebits.core.point import Point
from samebits.training.run.elastic_run import ElasticRun

PARAMETERS = 100
SEED = 1
OURS = "ours"
MEMORY = "memory"
SAVE_STEPS = 2
KEEP = 2
REST_S = 0.25
"""Seconds of training before and after a save, to measure the undisturbed speed."""


class Ours:
    """SameBits: a commit that saves, and a restarted process's load."""

    def __init__(self, state: samebits.elastic.TorchState) -> None:
        self._state = state
        session = state._session
        assert isinstance(session, ElasticRun), "under elastic.run"
        self._session = session
        self.undisturbed_s = 0.0
        """duration of the last commit without a save"""

    def prepare(self) -> None:
        """Advance to the next commit that saves, with all earlier saves durable."""
        self._state.flush()
        self.undisturbed_s = _timed(self._step_and_commit)
        while self._state.completed_steps % SAVE_STEPS != SAVE_STEPS - 1:
            self.undisturbed_s = _timed(self._step_and_commit)
        self._state.optimizer.step()

    def save(self) -> Callable[[], None]:
        self._state.commit()
        return self._state.flush

    def load(self) -> None:
        """Load as a generation that starts with this rank's own point on disk, by calls that no user makes."""
        points, tuning = self._session._points, self._session._tuning
        tuning.begin()
        found, filled = points._load(Point(self._state.completed_steps, generation=1))
        points._become(found, filled=filled)
        tuning.end()

    def _step_and_commit(self) -> None:
        self._state.optimizer.step()
        self._state.commit()


class FromMemory:
    """``state.restore()`` of a commit whose tensors were copied, after one more step."""

    def __init__(self, state: samebits.elastic.TorchState) -> None:
        self._state = state
        self._is_copying = False

    def prepare(self) -> None:
        if not self._is_copying:
            self._state.copy_every_commit()
            self._is_copying = True
            for _ in range(2):  # both of its buffers are in use
                self._state.optimizer.step()
                self._state.commit()
        self._state.optimizer.step()

    def load(self) -> None:
        self._state.restore()


class Training:
    """A small model to train beside the state, since a save takes cores from training rather than memory."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(SEED)
        model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
        self._model = model.to(device)
        self._optimizer = torch.optim.Adam(self._model.parameters())
        self._samples, self._labels = torch.rand(64, 512).to(device), torch.randint(0, 10, (64,)).to(device)

    def steps_per_s(self, is_over: Callable[[], bool]) -> float | None:
        """Return the rate from now until ``is_over``; None if that is true at once."""
        began_s, steps = time.monotonic(), 0
        while not is_over():
            self._optimizer.zero_grad()
            nn.functional.cross_entropy(self._model(self._samples), self._labels).backward()
            self._optimizer.step()
            arrive()
            steps += 1
        return steps / (time.monotonic() - began_s) if steps else None

    def undisturbed_per_s(self) -> float:
        until_s = time.monotonic() + REST_S
        return self.steps_per_s(lambda: time.monotonic() > until_s) or 0.0


def main() -> None:
    state_bytes, folder, device = int(sys.argv[1]), Path(sys.argv[2]), torch.device(sys.argv[3])
    torch.set_num_threads(1)
    samebits.init()
    model, optimizer = build(state_bytes, device)
    config = samebits.CheckpointConfig(save_checkpoint_steps=SAVE_STEPS, keep_checkpoint_max=KEEP)
    state = samebits.elastic.TorchState(model, optimizer, rng="per_step", seed=SEED, checkpoint=config)

    @samebits.elastic.run
    def train(state: samebits.elastic.TorchState) -> None:
        saved = {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()}
        contestants = {**ways(folder, saved), OURS: Ours(state), MEMORY: FromMemory(state)}
        obey(contestants, next(iter(flat(saved).values())), Training(device))

    train(state)


def build(state_bytes: int, device: torch.device) -> tuple[nn.Module, torch.optim.Adam]:
    """Return a model and its optimizer whose parameters and moments have that many bytes in 400 tensors."""
    elements = state_bytes // 4 // 3 // PARAMETERS
    torch.manual_seed(SEED)
    model = nn.ParameterList([nn.Parameter(torch.rand(elements).to(device)) for _ in range(PARAMETERS)])
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.rand(elements).to(device)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return model, optimizer


def obey(contestants: dict[str, Any], witness: torch.Tensor, training: Training) -> None:
    """Carry out the commands of standard input until ``end``.

    Args:
        contestants: ways to save and to load.
        witness: a tensor of the state.
        training: the training that runs beside a save.
    """
    notebook = Notebook.from_environment()
    notebook.note("ready", text=json.dumps(sorted(contestants)))
    for line in sys.stdin:
        verb, *arguments = line.split()
        if verb == "end":
            return
        way = contestants[arguments[0]]
        if verb == "save":
            answer: dict[str, float | None] = save(way)
        elif verb == "load":
            answer = load(way, witness)
        else:
            answer = train_while_saving(way, training, on_one_core=arguments[1] == "shared")
        notebook.note("done", text=json.dumps(answer))


def save(way: Way) -> dict[str, float | None]:
    """Measure how long training is blocked, how long until all is durable, and which processes computed meanwhile."""
    way.prepare()
    os.sync()
    arrive()
    cpu_s, began_s, helpers = time.process_time(), time.monotonic(), helpers_cpu_s()
    wait = way.save()
    blocked_s = time.monotonic() - began_s
    wait()
    durable_s = time.monotonic() - began_s
    if isinstance(way, Ours):
        blocked_s = max(0.0, blocked_s - way.undisturbed_s)
    writer_s = sum(helpers_cpu_s().values()) - sum(helpers.values())
    return {
        "blocked_s": blocked_s,
        "durable_s": durable_s,
        "writer_cpu_s": writer_s,
        "cpu_s": time.process_time() - cpu_s + writer_s,
    }


@torch.no_grad()
def load(way: Way, witness: torch.Tensor) -> dict[str, float | None]:
    """Measure restoring everything into the existing tensors."""
    if isinstance(way, FromMemory):
        way.prepare()
    right = float(witness[0])
    witness[0] = -1.0
    arrive()
    took_s = _timed(lambda: (way.load(), arrive()))
    if float(witness[0]) != right:
        raise AssertionError(f"loading brought back {float(witness[0])}, {right} was saved")
    return {"load_s": took_s}


def train_while_saving(way: Way, training: Training, *, on_one_core: bool) -> dict[str, float | None]:
    """Return steps per second from when training may continue until all is durable, and before and after.

    Args:
        on_one_core: this process, all its threads and its helpers share one core.
    """
    with on_core_of_its_own() if on_one_core else contextlib.nullcontext():
        way.prepare()
        os.sync()
        before = training.undisturbed_per_s()
        wait = way.save()
        is_durable = threading.Event()
        failures: list[BaseException] = []

        def watch() -> None:
            try:
                wait()
            except BaseException as error:
                failures.append(error)
            is_durable.set()

        watcher = threading.Thread(target=watch)
        watcher.start()
        during = training.steps_per_s(is_durable.is_set)
        watcher.join()
        if failures:
            raise failures[0]
        after = training.undisturbed_per_s()
    return {"during_per_s": during, "undisturbed_per_s": (before + after) / 2}


# --- this process and its helpers -------------------------------------------------------------------------------------


def helpers_cpu_s() -> dict[int, float]:
    """Return the CPU time of every process below this one, by pid (clock_getcpuclockid(3))."""
    found = {}
    for pid in processes_below(os.getpid()):
        with contextlib.suppress(OSError):  # it has just ended
            found[pid] = time.clock_gettime((~pid << 3) | 2)
    return found


@contextlib.contextmanager
def on_core_of_its_own() -> Iterator[None]:
    """Pin all threads of this process and its descendants to one core, as if every core trained."""
    cores = os.sched_getaffinity(0)
    _place_on({max(cores)})
    try:
        yield
    finally:
        _place_on(cores)


def _place_on(cores: set[int]) -> None:
    for pid in (os.getpid(), *processes_below(os.getpid())):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread.name), cores)


def _timed(call: Callable[[], object]) -> float:
    began_s = time.monotonic()
    call()
    return time.monotonic() - began_s


if __name__ == "__main__":
    main()
