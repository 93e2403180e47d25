"""Handlers: one value of each kind is split, remembered and restored; and user-defined types."""

from __future__ import annotations

import copy
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from samebits.core.point import Point
from samebits.core.reports import Digest
from samebits.core.watch import equality
from samebits.errors import UsageError
from samebits.training.process import context
from samebits.training.state import handlers, snapshot
from samebits.training.state.compared import parts_of
from samebits.training.state.handlers import OptimizerHandler, StateHandler, handler_of, register_handler
from samebits.training.state.torch_state import TorchState
from tests.training.commits import Commits, Net, backward, bits_of


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "get_rank", lambda: 0)
    monkeypatch.setattr(context, "get_world_size", lambda: 1)
    monkeypatch.setattr(handlers, "_registry", list(handlers._registry))


def sent(contents: Any) -> Any:
    """Return what another rank gets."""
    tree, parts = snapshot.split(contents, "state")
    return snapshot.join(tree, {part.name: part._replace(data=bytearray(part.data)) for part in parts})


class Loader:
    """The interface of torchdata's StatefulDataLoader: an iterable with a position to save and load."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.position = 0

    def __iter__(self) -> Iterator[int]:
        while self.position < self.length:
            self.position += 1
            yield self.position - 1
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "workers": [{"seen": self.position}]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def test_stateful_loader_continues_from_the_commit() -> None:
    loader = Loader(10)
    state = TorchState(loader=loader, rng="per_step")
    Commits(state)
    batches = iter(loader)
    assert [next(batches) for _ in range(4)] == [0, 1, 2, 3]
    state.commit()
    assert next(batches) == 4
    assert state.recall() == Point(1, 1)
    assert list(loader) == [4, 5, 6, 7, 8, 9]

    newcomer = Loader(10)
    other = TorchState(loader=newcomer, rng="per_step")
    state.restore()
    other.load(sent(state.contents()), own=False)
    assert list(newcomer) == [4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize(
    "make",
    [
        lambda one: torch.optim.lr_scheduler.CosineAnnealingLR(one, T_max=10),
        lambda one: torch.optim.lr_scheduler.OneCycleLR(one, max_lr=1.0, total_steps=20),
        lambda one: torch.optim.lr_scheduler.SequentialLR(
            one,
            [torch.optim.lr_scheduler.ConstantLR(one), torch.optim.lr_scheduler.ExponentialLR(one, 0.9)],
            milestones=[2],
        ),
    ],
    ids=["cosine", "one cycle", "sequential"],
)
def test_schedule_is_restored_and_sent_to_a_newcomer(make: Any) -> None:
    def new() -> tuple[TorchState, torch.optim.Optimizer]:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        return TorchState(model, optimizer, schedule=make(optimizer), rng="per_step"), optimizer

    def train(state: TorchState, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
        rates = []
        for _ in range(steps):
            optimizer.step()
            state.schedule.step()
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    state, optimizer = new()
    Commits(state)
    train(state, optimizer, 3)
    state.commit()
    contents = sent(state.contents())
    wanted = train(state, optimizer, 4)
    state.commit()
    newcomer, others = new()
    newcomer.load(contents, own=False)
    assert train(newcomer, others, 4) == wanted
    assert state.recall() == Point(7, 1)
    assert train(state, optimizer, 2) == train(newcomer, others, 2)


def test_gradient_scaler_is_sent_to_a_newcomer() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(1))
    newcomer = torch.amp.GradScaler("cpu", init_scale=64.0)
    other = TorchState(scaler=newcomer, rng="per_step")
    other.load(sent(TorchState(scaler=scaler, rng="per_step").contents()), own=False)
    assert newcomer.get_scale() == 2.0


@pytest.mark.parametrize("unscaled_by", ["the script", "the scaler's own step"])
def test_interrupted_step_is_repeated_with_unscaled_gradients(unscaled_by: str) -> None:
    """If not, survivors would step with gradients 256 times as large, unlike a newcomer."""
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    handler = handler_of(scaler)
    assert handler is not None
    handler.remember()
    scaler.scale(weight.sum()).backward()
    if unscaled_by == "the script":
        scaler.unscale_(optimizer)
    else:
        hook = optimizer.register_step_pre_hook(_peer_is_lost)
        with pytest.raises(ConnectionError):
            scaler.step(optimizer)
        hook.remove()
    handler.recall()
    optimizer.zero_grad()
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    assert weight.item() == 0.0


def test_disabled_scaler_is_restored_as_well() -> None:
    handler = handler_of(torch.amp.GradScaler("cpu", enabled=False))
    assert handler is not None
    handler.remember()
    handler.recall()
    handler.load(handler.contents())


def _peer_is_lost(*_: object) -> None:
    raise ConnectionError


class Tally:
    """A user-defined class."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}


class TallyHandler(StateHandler):
    def contents(self) -> Any:
        return self.value.counts

    def load(self, contents: Any) -> None:
        self.value.counts = dict(contents)

    def remember(self) -> None:
        self._remembered = dict(self.value.counts)

    def recall(self) -> None:
        self.value.counts = dict(self._remembered)


class Finer(Tally):
    pass


def test_registered_handler_applies_to_subclasses_and_the_last_one_wins() -> None:
    register_handler(Tally, TallyHandler)
    assert isinstance(handler_of(Finer()), TallyHandler)
    tally = Tally()
    state = TorchState(tally=tally, rng="per_step")
    Commits(state)
    tally.counts["seen"] = 3
    state.commit()
    tally.counts["seen"] = 4
    state.restore()
    assert state.tally is tally
    assert tally.counts == {"seen": 3}

    class Other(TallyHandler):
        pass

    register_handler(Finer, Other)
    assert type(handler_of(Finer())) is Other
    assert type(handler_of(Tally())) is TallyHandler


def test_plain_values_have_no_handler() -> None:
    assert [handler_of(one) for one in (1, "a", [1], {"a": 1}, None, torch.ones(1))] == [None] * 6


class Wide(torch.optim.Optimizer):
    """Keeps moments more precisely than the parameters, as optimizers for bfloat16 do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                moment = self.state[parameter].setdefault("moment", torch.zeros_like(parameter, dtype=torch.float32))
                moment.add_(1 / 3)


def test_moments_keep_their_dtype() -> None:
    """torch's own load_state_dict casts them to the parameters' dtype."""
    given, got = (nn.Linear(2, 2, dtype=torch.bfloat16) for _ in range(2))
    source, target = Wide(given.parameters()), Wide(got.parameters())
    source.step()
    OptimizerHandler(target).load(sent(OptimizerHandler(source).contents()))
    assert [one["moment"].dtype for one in target.state.values()] == [torch.float32] * 2
    assert all(
        torch.equal(target.state[one]["moment"], torch.full_like(one, 1 / 3, dtype=torch.float32))
        for one in got.parameters()
    )
    target.step()
    assert source.state[given.weight]["moment"][0, 0].item() == pytest.approx(1 / 3), "the copy is its own"


class Odd(torch.optim.Optimizer):
    """Its state has values that torch's ``load_state_dict`` casts, empties or cannot load."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": np.float64(0.1)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                kept = self.state[one]
                if not kept:
                    kept["nested"] = {"codes": torch.zeros_like(one, dtype=torch.int8), "scale": [one.double()]}
                    kept["last"] = deque([torch.zeros_like(one)], maxlen=2)
                    kept["seen"] = Counter()
                    kept["kind"], kept["array"] = "odd", np.ones(3, np.float32)
                    kept["wave"] = torch.zeros(2, dtype=torch.complex128)
                    kept["wide"] = torch.zeros(1).expand(4)
                kept["seen"]["steps"] += 1
                kept["nested"]["scale"][0] = kept["nested"]["scale"][0] * 0.9 + one.grad.double() / 3
                kept["nested"]["codes"] += 1
                kept["last"].append(one.grad.clone())
                kept["wave"] += kept["array"][0] * 1j
                one.sub_(kept["nested"]["scale"][0].to(one.dtype) * group["lr"] + kept["last"][0])


def form_of(contents: Any) -> Any:
    """Return types, dtypes, strides and bits."""
    tree, parts = snapshot.split(contents, "state")
    return tree, [(one.name, one.dtype, one.shape, bytes(one.data)) for one in parts]


@pytest.mark.parametrize(
    "make",
    [
        Odd,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        lambda parameters: torch.optim.Adam(parameters, amsgrad=True, foreach=True),
        lambda parameters: torch.optim.AdamW(parameters, fused=True),
        lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.01), capturable=False),
        lambda parameters: torch.optim.Adafactor(parameters, lr=0.01),
        lambda parameters: torch.optim.LBFGS(parameters, history_size=3, max_iter=2),
        torch.optim.Rprop,
    ],
    ids=["odd", "momentum", "adam", "fused", "tensor rate", "adafactor", "lbfgs", "rprop"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_optimizer_continues_with_the_same_bits(make: Any, dtype: torch.dtype) -> None:
    """In another process's optimizer, and in this one after a rollback."""

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(5)
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2)).to(dtype)
        optimizer = make(net.parameters())
        if not isinstance(optimizer, torch.optim.LBFGS):  # which accepts contiguous gradients only
            net.to(memory_format=torch.channels_last)
        return net, optimizer

    def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            inputs = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(step)).to(dtype)

            def closure(inputs: torch.Tensor = inputs) -> torch.Tensor:
                optimizer.zero_grad()
                loss = net(inputs).square().mean()
                loss.backward()
                return loss

            closure()
            optimizer.step(closure if isinstance(optimizer, torch.optim.LBFGS) else None)  # type: ignore[arg-type]

    first, second = made(), made()
    train(*first, range(3))
    handlers_of = [[handlers.ModuleHandler(net), OptimizerHandler(optimizer)] for net, optimizer in (first, second)]
    kept = [handlers.copied_tree(one.contents()) for one in handlers_of[0]]
    for one, other in zip(*handlers_of, strict=True):
        other.load(sent(one.contents()))
        assert form_of(other.contents()) == form_of(one.contents())
    train(*first, range(3, 6))
    train(*second, range(3, 6))
    assert [form_of(one.contents()) for one in handlers_of[0]] == [form_of(one.contents()) for one in handlers_of[1]]
    for one, contents in zip(handlers_of[0], kept, strict=True):
        one.load_back(contents)
        assert form_of(one.contents()) == form_of(contents)


class Clipped(nn.Linear):
    """Clips its weights when it loads them, but not in a step."""

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)


class Scaled(nn.Linear):
    """Saves ten times its weights, and divides what it loads."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = destination[f"{prefix}weight"] * 10

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        given = {**state_dict, f"{prefix}weight": state_dict[f"{prefix}weight"] / 10}
        super()._load_from_state_dict(given, prefix, *args)


def hooked(*sizes: int) -> nn.Linear:
    def clip(module: nn.Linear, _: object) -> None:
        module.weight.data.clamp_(-0.1, 0.1)

    module = nn.Linear(*sizes)
    module.register_load_state_dict_post_hook(clip)  # type: ignore[arg-type]
    return module


@pytest.mark.parametrize("made", [Clipped, Scaled, hooked])
def test_module_that_converts_what_it_loads_gets_the_trained_weights_back(made: Any) -> None:
    trained, fresh = made(3, 2), made(3, 2)
    with torch.no_grad():
        trained.weight.copy_(torch.tensor([[1.0, -2.0, 0.5], [4.0, 0.0, -8.0]]))
    handlers.ModuleHandler(fresh).load(sent(handlers.ModuleHandler(trained).contents()))
    assert torch.equal(fresh.weight, trained.weight)


def test_parameter_of_another_dtype_or_layout_is_refused() -> None:
    plain, last = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    # as in points of earlier releases
    handlers.ModuleHandler(last).load(sent(handlers.ModuleHandler(plain).contents()))
    for other in (last, nn.Conv2d(3, 4, 3).double()):
        with pytest.raises(UsageError, match=r"parameter weight is of .* Fix: call \.to\(dtype\)"):
            handlers.ModuleHandler(plain).load(sent(handlers.ModuleHandler(other).contents()))


def test_buffer_is_restored_in_its_changed_dtype_and_layout() -> None:
    given, got = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
    given.register_buffer("mask", torch.ones(1, 2, 3, 4).to(memory_format=torch.channels_last))
    got.register_buffer("mask", torch.ones(1, 2, 3, 4))
    given.running_mean = given.running_mean.double()  # type: ignore[union-attr]
    source, target = handlers.ModuleHandler(given), handlers.ModuleHandler(got)
    target.load(sent(source.contents()))
    assert form_of(target.contents()) == form_of(source.contents())
    source.remember()
    form = form_of(source.contents())
    given.mask = torch.zeros(1, 2, 3, 4)
    given.running_mean = torch.zeros(3)
    source.recall()
    assert form_of(source.contents()) == form


def test_optimizer_that_does_not_restore_what_it_returned_is_refused() -> None:
    class Rounding(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "own": torch.ones(1)}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            super().load_state_dict({key: value for key, value in state_dict.items() if key != "own"})

    weight = nn.Parameter(torch.ones(2))
    contents = sent(OptimizerHandler(Rounding([weight])).contents())
    OptimizerHandler(Rounding([weight])).load(contents)
    contents["own"] += 1
    with pytest.raises(UsageError, match=r"Rounding\.load_state_dict"):
        OptimizerHandler(Rounding([weight])).load(contents)


def thawing(rate: float = 0.1) -> tuple[nn.Module, torch.optim.Optimizer, TorchState]:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    optimizer = torch.optim.Adam(net[1].parameters(), lr=rate)
    return net, optimizer, TorchState(net, optimizer, rng="per_step", seed=1)


def step_and_commit(net: nn.Module, optimizer: torch.optim.Optimizer, state: TorchState) -> None:
    optimizer.zero_grad()
    net(torch.ones(1, 2)).square().sum().backward()
    optimizer.step()
    state.commit()


def test_added_groups_belong_to_a_commit() -> None:
    """To a newcomer's optimizer, to and from an earlier commit, and in a survivor that has not committed them."""
    net, optimizer, state = thawing()
    Commits(state)
    step_and_commit(net, optimizer, state)
    before = handlers.copied_tree(state.contents())
    optimizer.add_param_group({"params": list(net[0].parameters()), "lr": 0.5})  # type: ignore[index]
    assert state.recall() is not None
    assert form_of(state.contents()) == form_of(before), "it was added after the commit"
    optimizer.add_param_group({"params": list(net[0].parameters()), "lr": 0.5})  # type: ignore[index]
    step_and_commit(net, optimizer, state)
    other_net, other_optimizer, other = thawing()
    Commits(other)
    other.load(sent(state.contents()), own=True)
    assert [group["lr"] for group in other_optimizer.param_groups] == [0.1, 0.5]
    for one in ((net, optimizer, state), (other_net, other_optimizer, other)):
        step_and_commit(*one)
    assert form_of(other.contents()) == form_of(state.contents())
    other.load(sent(before), own=True)
    assert form_of(other.contents()) == form_of(before)


def test_group_of_parameters_in_no_module_is_refused_at_the_commit() -> None:
    net, optimizer, state = thawing()
    Commits(state)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(UsageError, match=r"state\.optimizer: group 1 was added after the state was made"):
        step_and_commit(net, optimizer, state)


def test_tensor_that_an_optimizer_trains_is_in_the_state_or_refused() -> None:
    net, alpha = nn.Linear(2, 2), torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([{"params": net.parameters()}, {"params": [alpha]}], lr=0.1)
    with pytest.raises(UsageError, match=r"TorchState\(optimizer=…\): parameter 0 of its group 1, of shape \(1,\)"):
        TorchState(net, optimizer)
    state = TorchState(net, optimizer, alpha=alpha, copy_commits=True)
    Commits(state)
    kept = sent(state.contents())
    (net(torch.ones(1, 2)).sum() * (1 + alpha)).sum().backward()
    optimizer.step()
    assert "alpha" in [one.name for one in state.named_parameters()]
    assert alpha.item()
    assert state.recall() is not None
    assert state.alpha is alpha and not alpha.item()
    alpha.data.fill_(3)
    state.load(kept, own=True)
    assert state.alpha is alpha and alpha.requires_grad and not alpha.item()
    with pytest.raises(UsageError, match="cannot be replaced"):
        state.alpha = torch.ones(1)


class TwoSteps(torch.optim.Optimizer):
    """Step twice with an optimizer of its own, as public implementations of SAM do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"rho": 0.05})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)

    @torch.no_grad()
    def climb(self) -> None:
        for one in self.param_groups[0]["params"]:
            self.state[one]["moved"] = one.grad * self.param_groups[0]["rho"]
            one.add_(self.state[one]["moved"])

    @torch.no_grad()
    def descend(self) -> None:
        for one in self.param_groups[0]["params"]:
            one.sub_(self.state[one]["moved"])
        self.base.step()


def trained_in_two_steps(steps: int, *, has_base: bool, kept: Any = None) -> TorchState:
    torch.manual_seed(0)
    model = Net()
    optimizer = TwoSteps(model.parameters())
    inner = {"base": optimizer.base} if has_base else {}
    state = TorchState(model, optimizer, **inner)
    if kept is not None:
        state.load(kept, own=False)
    Commits(state)
    for number in range(state.completed_steps, steps):
        for half in (optimizer.climb, optimizer.descend):
            model.zero_grad()
            backward(state, number)
            half()
        state.commit()
    return state


def test_optimizer_inside_another_is_in_the_state_or_refused() -> None:
    with pytest.raises(UsageError, match=r"the TwoSteps keeps a SGD in its attribute base.*base=optimizer\.base"):
        trained_in_two_steps(0, has_base=False)
    undisturbed = trained_in_two_steps(4, has_base=True)
    kept = sent(trained_in_two_steps(2, has_base=True).contents())
    assert bits_of(trained_in_two_steps(4, has_base=True, kept=kept)) == bits_of(undisturbed)
    assert undisturbed.completed_steps == 4


def test_weights_that_change_without_a_step_of_the_states_optimizers_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the refusal, no step would be counted or saved, and a loop over the steps would never end."""
    monkeypatch.setattr(TwoSteps, "state_dict", lambda self: self.base.state_dict())
    with pytest.raises(UsageError, match=r"test_handlers\.py:\d+: the weights have changed before 2 commits.*TwoSteps"):
        state = trained_in_two_steps(0, has_base=False)
        for number in range(3):
            for half in (state.optimizer.climb, state.optimizer.descend):
                backward(state, number)
                half()
            state.commit()


def test_different_learning_rate_is_named_before_the_weights_it_changed() -> None:
    first, second = thawing(0.1), thawing(0.2)
    for net, optimizer, state in (first, second):
        Commits(state)
        step_and_commit(net, optimizer, state)
    digests = [
        Digest(Point(1, 1), 1, bytes([rank]), b"", False, tuple(parts_of(one[2].compared())))
        for rank, one in enumerate((first, second))
    ]
    text = equality.sentence(equality.judge({0: b"a", 1: b"b"}), *digests)
    assert "first in lr of group 0 of optimizer (0.1 on rank 0, 0.2 on rank 1) and " in text
    assert " more: most likely something outside the state sets it" in text
    assert text.endswith("pass the schedule to the state, as in TorchState(model, optimizer, schedule=schedule)")


def test_temporary_difference_in_rates_is_distinguished_afterwards() -> None:
    """A schedule outside the state restarts in a replacement and causes such a temporary difference."""
    parts = []
    for change_at in (1, 2):
        net, optimizer, state = thawing()
        Commits(state)
        for step in range(3):
            if step == change_at:
                optimizer.param_groups[0]["lr"] = 0.01
            step_and_commit(net, optimizer, state)
        parts.append({part.name: part.value for part in parts_of(state.compared())})
    assert [one["lr of group 0 of optimizer"] for one in parts] == ["0.01 since step 2", "0.01 since step 3"]


@pytest.mark.parametrize("value", [lambda: 0, [{"deep": object()}], {1: (nn.ReLU,)}], ids=["lambda", "deep", "class"])
def test_unsavable_value_is_refused_where_it_is_given(value: Any) -> None:
    """When the state is made, and at the commit after it was set, before any save or recovery."""
    with pytest.raises(UsageError, match=r"^state\.best\S*: a builtins\.\w+ cannot be saved"):
        TorchState(best=value)
    net, optimizer, state = thawing()
    state = TorchState(net, optimizer, best=0.0, copy_commits=True)
    Commits(state)
    state.best = value
    with pytest.raises(UsageError, match=r"^state\.best\S*: a builtins\.\w+ cannot be saved"):
        step_and_commit(net, optimizer, state)
    assert state.recall() is None, "part of two commits is neither"


def test_names_depend_on_no_wrapper() -> None:
    model = nn.Linear(2, 2)
    compiled = torch.compile(model)
    assert isinstance(compiled, nn.Module)
    assert handlers.bare(compiled) is model
    wrapped = TorchState(compiled, rng="per_step").contents()
    assert list(wrapped["shared"]["values"]["model"]) == ["weight", "bias"]


# ---- a module's extra state


class Scaled(nn.Module):
    """Like FP8 layers: a history of inputs and a count, which every forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.scaling: dict[str, Any] = {"history": torch.zeros(3), "seen": []}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scaling["history"][0] += x.detach().abs().max()
        self.scaling["seen"].append(float(x.detach().max()))
        scale: torch.Tensor = 1 + self.scaling["history"][0]
        return x * self.weight / scale

    def get_extra_state(self) -> dict[str, Any]:
        return self.scaling

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.scaling = state


class Scales(nn.Module):
    """Has such a layer, and batch statistics beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Scaled()
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = self.layer(self.norm(x))
        return scaled

    @property
    def told(self) -> tuple[list[float], list[float], int]:
        """Return its extra state and how often the statistics were taken."""
        scaling = self.layer.scaling
        return scaling["history"].tolist(), list(scaling["seen"]), int(self.norm.num_batches_tracked or 0)


def scaling_state(*, copies: bool = False) -> tuple[TorchState, Scales]:
    model = Scales()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return TorchState(model, optimizer, rng="per_step", copy_commits=copies), model


X = torch.tensor([[1.0, 2.0], [3.0, 5.0]])


@pytest.mark.parametrize("copies", [False, True])
def test_survivors_extra_state_returns_to_what_a_newcomer_gets(copies: bool) -> None:
    state, model = scaling_state(copies=copies)
    Commits(state)
    for number in range(3):  # the memory of an earlier commit is reused
        model(X + number)
        state.commit()
    committed = model.told
    for _ in range(2):  # the remembered state must be available twice
        model(2 * X).sum().backward()  # a peer is lost in here
        assert model.told != committed
        assert state.recall() == Point(0, 1)
        assert model.told == committed
    newcomer, others = scaling_state()
    newcomer.load(copy.deepcopy(sent(state.contents())), own=False)
    assert others.told == model.told
    assert torch.equal(others(X), model(X))


class TellsOnly(nn.Linear):
    """Returns an extra state that cannot be loaded; torch itself refuses to."""

    def get_extra_state(self) -> str:
        return "version 2"


def test_modules_without_extra_state_are_not_asked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(2, 2), TellsOnly(2, 2), nn.BatchNorm1d(2))
    handler = handler_of(model)
    assert handler is not None
    monkeypatch.setattr(TellsOnly, "get_extra_state", lambda _: pytest.fail("asked"))
    with monkeypatch.context() as during_a_commit:
        during_a_commit.setattr(handlers, "copied_tree", lambda *_: pytest.fail("copied"))
        handler.remember()
    model(torch.rand(4, 2))
    handler.recall()
    assert model[2].num_batches_tracked == 0
