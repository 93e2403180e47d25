"""The rank processes of test_ddp_processes.py: ``ddp_ranks.py <port> <node> <scenario> <arguments>``."""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from samebits.training.group import ddp
from samebits.training.group.group import Group, form_alone, is_communication_failure
from tests.training.hub import Member

CPU = torch.device("cpu")
WIDTH = 48
BUCKET_CAP_MB = 0.008  # one or two layers per bucket


class Shuffled(nn.Module):
    """Layers registered in another order than used, so that DDP's first layout is not its final one."""

    def __init__(self, norm: bool = False, unused: bool = False, double: bool = False) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, 10)
        self.third = nn.Linear(WIDTH, WIDTH)
        self.first = nn.Linear(24, WIDTH)
        self.fifth = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.sixth = nn.Linear(WIDTH, WIDTH)
        self.fourth = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()
        self.idle = nn.Linear(WIDTH, WIDTH) if unused else None
        self.scale = nn.Parameter(torch.ones(300, dtype=torch.float64)) if double else None
        self.steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x)).relu()
        for layer in (self.second, self.third, self.fourth, self.fifth, self.sixth):
            x = x + layer(x).tanh()
        if self.scale is not None:
            x = (x * self.scale.mean()).float()
        return self.last(x)


class Sometimes(Shuffled):
    """One layer is used in odd steps only."""

    def __init__(self) -> None:
        super().__init__(unused=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = super().forward(x)
        assert self.idle is not None
        if self.steps % 2:
            result = result + self.idle(torch.ones(WIDTH)).sum()
        return result


class Tied(Shuffled):
    def __init__(self) -> None:
        super().__init__()
        self.fourth.weight = self.second.weight


class Frozen(Shuffled):
    def __init__(self) -> None:
        super().__init__()
        self.third.requires_grad_(False)


@dataclass(frozen=True)
class Variant:
    model: Any
    options: dict[str, Any]


def where_known(option: str) -> dict[str, Any]:
    """Return an option that came with a later torch, or none if this torch lacks it."""
    return {option: True} if option in inspect.signature(DistributedDataParallel).parameters else {}


VARIANTS = {
    "plain": Variant(Shuffled, {}),
    "view": Variant(Shuffled, {"gradient_as_bucket_view": True}),
    "batched": Variant(Shuffled, where_known("batched_grad_copy")),  # since 2.12
    "lazy": Variant(Shuffled, where_known("lazy_bucket_allocation")),  # since 2.15
    "unused": Variant(Sometimes, {"find_unused_parameters": True}),
    "static": Variant(lambda: Shuffled(unused=True), {"static_graph": True}),
    "tied": Variant(Tied, {}),
    "frozen": Variant(Frozen, {}),
    "norm": Variant(lambda: Shuffled(norm=True), {}),
    "double": Variant(lambda: Shuffled(double=True), {}),
}


class Trained:
    """One variant with its optimizer."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        variant = VARIANTS[name]
        self.model = variant.model()
        self.optimizer = torch.optim.SGD(
            [one for one in self.model.parameters() if one.requires_grad], lr=0.05, momentum=0.9
        )
        self.ddp = DistributedDataParallel(self.model, bucket_cap_mb=BUCKET_CAP_MB, **variant.options)

    def step(self, number: int) -> None:
        generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
        x = torch.randn(16, 24, generator=generator)
        y = torch.randint(0, 10, (16,), generator=generator)
        self.model.steps = number
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.ddp(x), y).backward()
        self.optimizer.step()

    def state(self) -> dict[str, torch.Tensor]:
        tensors = {f"model/{name}": value.clone() for name, value in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            buffer = self.optimizer.state.get(parameter, {}).get("momentum_buffer")
            if buffer is not None:
                tensors[f"momentum/{name}"] = buffer.clone()
        return tensors

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, value in self.model.state_dict().items():
                value.copy_(tensors[f"model/{name}"])
        self.optimizer.state.clear()
        for name, parameter in self.model.named_parameters():
            if f"momentum/{name}" in tensors:
                self.optimizer.state[parameter]["momentum_buffer"] = tensors[f"momentum/{name}"].clone()

    def sha256(self) -> str:
        digest = hashlib.sha256()
        for _, parameter in sorted(self.model.named_parameters()):
            digest.update(parameter.detach().numpy().tobytes())
        return digest.hexdigest()


def stock(member: Member, folder: str, rank: int, world_size: int, steps: int, names: list[str]) -> None:
    """Train with torch alone, undisturbed."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size)
    trained = {name: Trained(name) for name in names}
    for one in trained.values():
        for number in range(steps):
            one.step(number)
    member.say("final", shas={name: one.sha256() for name, one in trained.items()})
    member.wait_for_word("end")
    dist.destroy_process_group()


def enter(member: Member, after: int) -> tuple[Group, int]:
    generation, rank, world_size = member.next_plan(after)
    group = Group(CPU, rank, world_size, member.exchange(generation), name=f"generation {generation}")
    member.on_break = group.break_
    group.form()
    return group, generation


def riding(
    member: Member, folder: str, saved_at: int, steps: int, names: list[str], inside: bool, forget: bool
) -> None:
    """The same training in generations: save at ``saved_at``, continue until a rank is lost, and resume from there.

    ``inside`` builds the wrappers in each generation, ``forget`` is the mutant that loses the layouts.
    """
    ddp.install()
    alone = form_alone(CPU)
    trained = {} if inside else {name: Trained(name) for name in names}
    initial = {name: one.state() for name, one in trained.items()}
    alone.drop()
    group, generation = enter(member, -1)
    save = Path(folder)
    while True:
        point = save / "point.json"
        layouts, first = None, 0
        if generation > 0 and saved_at > 0:
            layouts, first = (None if forget else json.loads(point.read_text())), saved_at
        ddp.attach_all(group, layouts)
        if inside:
            trained = {name: Trained(name) for name in names}
            initial = initial or {name: one.state() for name, one in trained.items()}
        for name, one in trained.items():
            one.load(safetensors.torch.load_file(save / f"{name}.st") if first else initial[name])
        try:
            _train(member, trained, first, saved_at, steps, save, generation)
        except Exception as error:
            if not is_communication_failure(error):
                raise
            member.say("left", generation=generation, error=f"{type(error).__name__}: {error}")
            error.__traceback__ = None
        else:
            break
        group.drop()
        group, generation = enter(member, generation)
    member.say("final", shas={name: one.sha256() for name, one in trained.items()})
    member.wait_for_word("end")
    group.drop()


def _train(
    member: Member, trained: dict[str, Trained], first: int, saved_at: int, steps: int, save: Path, generation: int
) -> None:
    if generation == 0:
        for name, one in trained.items():
            for number in range(saved_at):
                one.step(number)
            if dist.get_rank() == 0:
                safetensors.torch.save_file(one.state(), save / f"{name}.st")
        layouts = ddp.capture_all()
        if dist.get_rank() == 0:
            (save / "point.json").write_text(json.dumps(layouts))
        dist.barrier()
        member.say("saved", layouts=layouts)
        number = saved_at
        while True:  # until a rank is lost
            for one in trained.values():
                one.step(number)
            number += 1
    for one in trained.values():
        for number in range(first, steps):
            one.step(number)


SCENARIOS = {one.__name__: one for one in (stock, riding)}


def main() -> None:
    port, node, scenario, arguments = sys.argv[1:]
    torch.set_num_threads(1)
    member = Member(int(port), int(node))
    try:
        SCENARIOS[scenario](member, **json.loads(arguments))
    except BaseException as error:
        member.say("failed", error=f"{type(error).__name__}: {error}")
        raise
    member.say("end")


if __name__ == "__main__":
    main()
