"""A worker whose values are overwritten as drawn by ``benchmarks.corruption_draws``.

``python -m benchmarks.workers.corruption SEED FIRST COUNT``. Bytes are written to memory directly, so that neither
autograd nor a tensor's version shows it. Every window of steps begins with the same state, and each rank sends the hash
of its weights and moments near the end of each window. COUNT=0 with a fourth argument STEPS trains undisturbed.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys

import numpy as np
import torch

# A process's first optimizer would import this, for a second or more; it is part of the start.
import torch._dynamo
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import samebits
from benchmarks.corruption_draws import HASHED_AT, RESET_AT, WINDOW, Draw, Place, corrupt, draw, window_of
from benchmarks.moments import Notebook

BATCH, FEATURES, WIDTH, CLASSES = 32, 32, 64, 8
CHECKPOINT_STEPS = 1000


class Net(nn.Module):
    """float32 (n, FEATURES) to (n, CLASSES), with a layer in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.bfloat = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.second(torch.tanh(self.first(inputs))))
        outputs: torch.Tensor = self.last(torch.tanh(self.bfloat(hidden.bfloat16()).float()))
        return outputs

    def layers(self) -> list[nn.Linear]:
        """Return the layers whose values are overwritten."""
        return [self.first, self.second, self.bfloat]


class Corrupter:
    """Overwrites values in this process, each draw once.

    Args:
        draws: all draws, by window.
        net: the network.
        optimizer: its Adam.
        notebook: where draws that were carried out are reported.
    """

    def __init__(self, draws: dict[int, Draw], net: Net, optimizer: torch.optim.Optimizer, notebook: Notebook) -> None:
        self._draws, self._net, self._optimizer, self._notebook = draws, net, optimizer, notebook
        self._node = int(os.environ["NODE_ID"].partition(".")[0])  # the rank, since no worker is replaced
        self._done: set[int] = set()  # windows
        self._before = 0
        self.step = 0
        """The step that is being computed; 0 outside forward and backward passes."""
        for place, layer in enumerate(net.layers()):
            layer.weight.register_hook(lambda gradient, place=place: self._on_gradient(gradient, place))
            layer.register_forward_hook(lambda _module, _inputs, output, place=place: self._on_output(output, place))

    def begin(self, step: int) -> None:
        """Begin a step; a draw of a later window that a rollback has undone is carried out again."""
        if step <= self._before:
            current = window_of(step + RESET_AT - WINDOW)  # a comparison takes place before the end of its window
            self._done = {window for window in self._done if window <= current}
        self._before = self.step = step

    def at_rest(self, step: int) -> None:
        """Overwrite a weight or a moment after the commit of this step."""
        one = self._due(step, Place.WEIGHT, Place.MOMENT)
        if one is not None:
            rng = one.rng()
            value = self._net.layers()[rng.randrange(3)].weight
            if one.place is Place.MOMENT:
                value = self._optimizer.state[value][rng.choice(("exp_avg", "exp_avg_sq"))]
            self._carry_out(one, value.detach(), rng)

    def reduced(self) -> None:
        """Overwrite a gradient that all ranks have reduced."""
        one = self._due(self.step, Place.RECEIVED, Place.SUM)
        if one is not None:
            rng = one.rng()
            gradient = self._net.layers()[rng.randrange(3)].weight.grad
            assert gradient is not None, "the backward pass has ended"
            self._carry_out(one, gradient, rng)

    def _on_gradient(self, gradient: torch.Tensor, place: int) -> None:
        self._in_pass(gradient, place, Place.GRADIENT, Place.AUDITED_GRADIENT)

    def _on_output(self, output: torch.Tensor, place: int) -> None:
        self._in_pass(output.detach(), place, Place.ACTIVATION, Place.AUDITED_ACTIVATION)

    def _in_pass(self, value: torch.Tensor, place: int, *places: Place) -> None:
        one = self._due(self.step, *places)
        if one is not None:
            rng = one.rng()
            if rng.randrange(3) == place:
                self._carry_out(one, value, rng)

    def _due(self, step: int, *places: Place) -> Draw | None:
        one = self._draws.get(window_of(step)) if step else None
        if one is None or one.step != step or one.place not in places or one.window in self._done:
            return None
        return one if one.place is Place.SUM or one.victim == self._node else None

    def _carry_out(self, one: Draw, value: torch.Tensor, rng: object) -> None:
        self._done.add(one.window)
        size_bytes = value.numel() * value.element_size()
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(value.data_ptr()))
        is_changed = corrupt(memory, value.element_size(), value.shape[-1], one.kind, rng)  # type: ignore[arg-type]
        self._notebook.note("corrupted", one.number, "changed" if is_changed else "same")


def state_hash(net: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return a hash of all weights and moments."""
    digest = hashlib.sha256()
    for parameter in net.parameters():
        moments = optimizer.state[parameter]
        for tensor in (parameter.detach(), moments["exp_avg"], moments["exp_avg_sq"]):
            digest.update(tensor.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def main() -> None:
    seed, first, count = map(int, sys.argv[1:4])
    steps = int(sys.argv[4]) if len(sys.argv) > 4 else WINDOW * count + RESET_AT
    notebook = Notebook.from_environment()
    samebits.init()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    net = Net()
    begun = [one.detach().clone() for one in net.parameters()]
    optimizer = torch.optim.Adam(net.parameters(), lr=0.003)
    draws = {window: draw(seed, first + window - 1, window) for window in range(1, count + 1)}
    corrupter = Corrupter(draws, net, optimizer, notebook)
    model = DistributedDataParallel(net)
    checkpoint = samebits.CheckpointConfig(save_checkpoint_steps=CHECKPOINT_STEPS, keep_checkpoint_max=2)
    state = samebits.elastic.TorchState(model, optimizer, rng="per_step", checkpoint=checkpoint)

    def reset() -> None:
        """Return to the state that every window begins with."""
        with torch.no_grad():
            for parameter, before in zip(net.parameters(), begun, strict=True):
                parameter.copy_(before)
                for moment in optimizer.state[parameter].values():
                    moment.zero_()

    @samebits.elastic.run
    def train(state: samebits.elastic.TorchState) -> None:
        while state.completed_steps < steps:
            step = state.completed_steps + 1
            positions = torch.arange(BATCH * FEATURES).reshape(BATCH, FEATURES)
            inputs = torch.sin(positions * (step % WINDOW + 1.0) + samebits.get_rank())
            labels = (inputs.sum(1).abs() * 3).long() % CLASSES
            optimizer.zero_grad()
            corrupter.begin(step)
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            corrupter.reduced()
            corrupter.step = 0
            optimizer.step()
            if step % WINDOW == HASHED_AT % WINDOW and step > WINDOW:
                notebook.note("hashed", step, state_hash(net, optimizer))
            if step % WINDOW == RESET_AT % WINDOW:
                reset()
            state.report(loss=loss, total_steps=steps)
            state.commit()
            corrupter.at_rest(step)

    train(state)
    notebook.note("ended", state.completed_steps)


if __name__ == "__main__":
    main()
