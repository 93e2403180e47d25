"""Models that are built on the meta device: cut without memory, then filled part by part."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from examples.mesh.train import Transformer, parallelize
from samebits.errors import CheckpointError, UsageError
from samebits.training.group import meshes
from samebits.training.sharding import filling
from samebits.training.sharding.pieces import Piece
from samebits.training.sharding.whole import whole
from samebits.training.state.handlers import copied_tree
from samebits.training.state.torch_state import TorchState
from tests.training.sharding.worlds import alone, locals_of, world

NAMES = ("dp_replicate", "dp_shard", "tp")


def state_on_meta(sizes: tuple[int, ...], seed: int = 4) -> TorchState:
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=NAMES)
    with torch.device("meta"):
        model = Transformer(dim=32, layers=1, length=16)
    parallelize(model, mesh, MixedPrecisionPolicy())
    torch.manual_seed(seed)
    return TorchState(model, torch.optim.AdamW(model.parameters(), fused=True), rng="per_step")


@pytest.mark.parametrize("sizes", [(1, 2, 2), (2, 2, 1), (2, 1, 2), (1, 1, 4)], ids=str)
def test_each_rank_gets_its_part_of_the_weights_that_one_process_would_draw(sizes: tuple[int, ...]) -> None:
    plain = Transformer(dim=32, layers=1, length=16)
    torch.manual_seed(4)
    plain.init_weights()
    with alone():
        state = state_on_meta(sizes)
        parameters, trained = list(state.model.parameters()), state.optimizer.param_groups[0]["params"]
    torch.manual_seed(9)
    before = torch.get_rng_state()
    with world(3, 4):
        meshes.form_all()
        state.enter_group()
        for mine, one in zip(parameters, plain.parameters(), strict=True):
            assert torch.equal(mine._local_tensor, Piece.of(mine, "a parameter").cut(one))
        held, all_of_it = (sum(one.numel() for one in some) for some in (locals_of(state.model), plain.parameters()))
        assert held < all_of_it
    assert all(one is other for one, other in zip(parameters, trained, strict=True))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_point_of_step_0_lets_every_rank_draw_rank_0s_weights_again() -> None:
    with alone():
        first, other = state_on_meta((1, 2, 2)), state_on_meta((1, 2, 2), seed=7)
        contents = copied_tree(first.contents())
        values = contents["shared"]["values"]
        loaded = {**values, "model": {**values["model"], "norm.weight": torch.ones(32)}}
        with pytest.raises(CheckpointError, match=r"state\.model\.norm\.weight is on the meta device"):
            first.load({**contents, "shared": {**contents["shared"], "values": loaded}}, own=True)
        with pytest.raises(CheckpointError, match=r"state\.model\.tokens\.weight: .* holds no weights"):
            whole([contents["shared"]["values"]["model"]], [], "state.model")
    with world(2, 4):
        meshes.form_all()
        first.enter_group()
        expected = locals_of(first.model)
        other.enter_group()
        assert not torch.equal(locals_of(other.model)[0], expected[0])
        other.load(contents, own=False)
        assert all(torch.equal(one, two) for one, two in zip(locals_of(other.model), expected, strict=True))
        assert "drawn_from" not in other.contents()["shared"]


class Bare(nn.Module):
    """A parameter that nothing fills."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: nn.Linear(4, 4), r"model\.weight is on the meta device and not sharded. Fix: apply fully_shard"),
        (lambda: fully_shard(Bare()), r"model \(FSDPBare\) is on the meta device and has no reset_parameters\(\)"),
        (lambda: fully_shard(nn.Linear(4, 4)), ""),
    ],
    ids=["whole", "nothing fills it", "filled"],
)
def test_what_could_not_be_filled_is_refused(build: object, message: str) -> None:
    assert callable(build)
    with world(), torch.device("meta"):
        model = build()
        if message:
            with pytest.raises(UsageError, match=message):
                filling.require_fillable("model", model)
        else:
            filling.require_fillable("model", model)
