"""FSDP2 modules moved from whole to sharded and to the next group, in place and as fully_shard does it."""

from __future__ import annotations

import contextlib
import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from samebits.core.messages import Sharding
from samebits.errors import CheckpointError, UsageError
from samebits.training.group import meshes
from samebits.training.sharding import regrouping
from samebits.training.sharding.pieces import Piece
from samebits.training.sharding.whole import whole
from samebits.training.state.data.global_batch import GlobalBatch
from samebits.training.state.data.sampler import ElasticSampler
from samebits.training.state.handlers import copied_tree
from samebits.training.state.sharded_values import ShardedValues
from samebits.training.state.torch_state import TorchState
from tests.training.sharding.worlds import (
    RANKS,
    alone,
    locals_of,
    loss_of,
    sharded_model,
    sharded_state,
    train_one_step,
    world,
)

KEPT_BY_TORCH = ("sharded_size", "contiguous_sharded_stride", "padded_sharded_param_size", "_sharded_param_data")


@pytest.mark.parametrize("rank", range(RANKS))
def test_parameters_are_cut_as_fully_shard_cuts_them_in_that_world(rank: int) -> None:
    with world():
        model = sharded_model()
        loss_of(model)  # a forward pass initialises FSDP2 for a group of one
    with world(rank, RANKS):
        regrouping.attach([model], [])
        stock = sharded_model()
        for one, other in zip(model.parameters(), stock.parameters(), strict=True):
            assert one._spec == other._spec  # type: ignore[attr-defined]
            torch.testing.assert_close(one._local_tensor, other._local_tensor, rtol=0, atol=0)  # type: ignore[attr-defined]
        pairs = zip(regrouping.parameter_groups(model), regrouping.parameter_groups(stock), strict=True)
        for mine, theirs in (
            pair for one, other in pairs for pair in zip(one.fsdp_params, other.fsdp_params, strict=True)
        ):
            for name in KEPT_BY_TORCH:
                here, there = getattr(mine, name), getattr(theirs, name)
                assert torch.equal(here, there) if isinstance(here, torch.Tensor) else here == there, name
            assert mine._sharded_param_data.data_ptr() == mine.sharded_param._local_tensor.data_ptr() or rank == 2
            assert (mine.mesh_info.shard_mesh_rank, mine.mesh_info.shard_mesh_size) == (rank, RANKS)
            assert mine.mesh_info.shard_process_group is dist.group.WORLD
            assert mine.all_gather_outputs == [] and not hasattr(mine, "_unsharded_param")
        loss_of(model)  # shapes match: with silent peers there are no values to compare


def test_parameters_stay_the_objects_that_optimizers_hold() -> None:
    with world():
        state = sharded_state()
        train_one_step(state)
        before = list(state.model.parameters())
        whole = [state.optimizer.state[one]["exp_avg"]._local_tensor for one in before]
    with world(1, RANKS):
        regrouping.attach([state.model], [state.optimizer])
        assert all(one is other for one, other in zip(state.model.parameters(), before, strict=True))
        for one, moment in zip(before, whole, strict=True):
            cut = state.optimizer.state[one]["exp_avg"]
            assert cut._spec.placements == one._spec.placements and cut._spec.mesh == one._spec.mesh
            assert torch.equal(cut._local_tensor, list(moment.chunk(RANKS))[1])
        for one in before:
            one.grad = torch.zeros_like(one)
        state.optimizer.step()


def test_next_group_of_the_same_size_replaces_only_the_group() -> None:
    with world():
        model = sharded_model()
    with world(2, RANKS):
        regrouping.attach([model], [])
        before, places = locals_of(model), [one._local_tensor.data_ptr() for one in model.parameters()]
    with world(2, RANKS):
        regrouping.attach([model], [])
        assert [one._local_tensor.data_ptr() for one in model.parameters()] == places
        assert all(torch.equal(one, other) for one, other in zip(locals_of(model), before, strict=True))
        for group in regrouping.parameter_groups(model):
            assert group.mesh_info.shard_process_group is dist.group.WORLD is group.mesh_info.mesh.get_group()
            assert group._all_gather_process_group is dist.group.WORLD is group._reduce_scatter_process_group


@pytest.mark.parametrize(("rank", "size"), [(0, 2), (1, RANKS), (0, 1)])
def test_other_place_is_refused_with_the_supported_way(rank: int, size: int) -> None:
    with world():
        model = sharded_model()
    with world(0, RANKS):
        regrouping.attach([model], [])
    with world(rank, size), pytest.raises(UsageError, match=f"over 3 ranks .this process is rank 0.* has {size}.*dcp"):
        regrouping.attach([model], [])


def test_interrupted_step_leaves_nothing_behind() -> None:
    with world():
        model, undisturbed = sharded_model(), sharded_model()
        loss_of(undisturbed, 1).backward()

        def cut_off(*_: object) -> None:
            raise ConnectionError("a peer is gone")

        handle = model[0].register_forward_hook(lambda module, inputs, output: output.register_hook(cut_off) and None)
        with pytest.raises(ConnectionError):
            loss_of(model, 0).backward()
        handle.remove()
        assert any(not group.is_sharded for group in regrouping.parameter_groups(model)), "the test shows nothing"
        regrouping.reset(model)
        assert all(group.is_sharded for group in regrouping.parameter_groups(model))
        assert [one.grad for one in model.parameters()] == [None] * 6
        loss_of(model, 1).backward()
        for one, other in zip(model.parameters(), undisturbed.parameters(), strict=True):
            assert torch.equal(one.grad._local_tensor, other.grad._local_tensor)  # type: ignore[union-attr]


@pytest.mark.parametrize("policy", [{}, {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}], ids=str)
def test_interrupted_window_adds_nothing_to_the_next_one(policy: dict[str, torch.dtype]) -> None:
    with world():
        model, undisturbed = (sharded_model(mp_policy=MixedPrecisionPolicy(**policy)) for _ in range(2))
        loss_of(undisturbed, 1).backward()
        model.set_requires_gradient_sync(False)
        loss_of(model, 0).backward()
        regrouping.reset(model)
        model.set_requires_gradient_sync(True)
        loss_of(model, 1).backward()
        for one, other in zip(model.parameters(), undisturbed.parameters(), strict=True):
            assert torch.equal(one.grad._local_tensor, other.grad._local_tensor)  # type: ignore[union-attr]


NAMES = ("dp_replicate", "dp_shard")


def mesh_model(sizes: tuple[int, ...]) -> nn.Sequential:
    return sharded_model(mesh=init_device_mesh("cpu", sizes, mesh_dim_names=NAMES[-len(sizes) :]))


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2), (6, 1), (1, 6), (6,)], ids=str)
@pytest.mark.parametrize("rank", [0, 3, 5])
def test_over_a_declared_mesh_parameters_are_cut_as_fully_shard_does_it(sizes: tuple[int, ...], rank: int) -> None:
    with alone():
        model = mesh_model(sizes)
        loss_of(model)
        require(model)
    with world(rank, 6):
        meshes.form_all()
        regrouping.attach([model], [])
        stock = mesh_model(sizes)
        for one, other in zip(model.parameters(), stock.parameters(), strict=True):
            assert one._spec == other._spec  # type: ignore[attr-defined]
            assert torch.equal(one._local_tensor, other._local_tensor)  # type: ignore[attr-defined]
        for mine, theirs in zip(regrouping.parameter_groups(model), regrouping.parameter_groups(stock), strict=True):
            assert mine.mesh_info.shard_mesh_rank == theirs.mesh_info.shard_mesh_rank
            assert mine.mesh_info.shard_mesh_size == theirs.mesh_info.shard_mesh_size
            assert mine.mesh_info.shard_process_group is mine.mesh_info.mesh.get_group(NAMES[-1])
        before = locals_of(model)
        loss_of(model)
    with world(rank, 6):
        meshes.form_all()
        regrouping.attach([model], [])
        assert all(torch.equal(one, other) for one, other in zip(locals_of(model), before, strict=True))
        for group in regrouping.parameter_groups(model):
            info = group.mesh_info
            assert info.shard_process_group is info.mesh.get_group(NAMES[-1])
            assert len(sizes) == 1 or info.replicate_process_group is info.mesh.get_group(NAMES[0])
    with world(1, 6):
        meshes.form_all()
        with pytest.raises(UsageError, match="cannot take another rank's position"):
            regrouping.attach([model], [])


def test_a_shard_moves_between_replicas_and_to_no_other_part() -> None:
    with alone():
        model = mesh_model((3, 2))
        state = TorchState(model, torch.optim.Adam(model.parameters()))
        sharded = ShardedValues.of(state.handlers)
        assert sharded is not None
        sharded.let_shrink(2, 6)
        assert sharded.sharding(6) == Sharding((3, 2), (True, False), 0)
        loss_of(model)
        require(model)
    with world(5, 6):
        meshes.form_all()
        regrouping.attach([model], [])
        before = locals_of(model)
        loss_of(model)
    for rank, ranks in ((1, 2), (3, 4), (5, 6)):
        with world(rank, ranks):
            meshes.form_all()
            regrouping.attach([model], [])
            assert all(torch.equal(one, other) for one, other in zip(locals_of(model), before, strict=True))
            for group in regrouping.parameter_groups(model):
                info = group.mesh_info
                assert (info.replicate_mesh_size, info.shard_mesh_size, info.shard_mesh_rank) == (ranks // 2, 2, 1)
            loss_of(model)
    with world(0, 4):
        meshes.form_all()
        with pytest.raises(UsageError, match="cannot take another rank's position"):
            regrouping.attach([model], [])


@pytest.mark.parametrize(
    ("sizes", "least", "message"),
    [
        ((4,), 2, r"sharded over 4 \(dp_shard\), in which no dimension holds replicas"),
        ((2, 2), 3, r"MIN_WORKER_NUM=3 and MAX_WORKER_NUM=4: .* only whole shard groups of 2 workers.* multiple of 2"),
        ((1, 4), 2, "in which no dimension holds replicas"),
        ((4, 1), 3, ""),
    ],
)
def test_only_the_number_of_replicas_changes(sizes: tuple[int, ...], least: int, message: str) -> None:
    with alone():
        model = mesh_model(sizes)
        sharded = ShardedValues.of(TorchState(model, torch.optim.SGD(model.parameters(), 0.1)).handlers)
        assert sharded is not None
        with pytest.raises(UsageError, match=message) if message else contextlib.nullcontext():
            sharded.let_shrink(least, 4)


@pytest.mark.parametrize(
    ("sizes", "names", "shrinks"),
    [
        ((2, 2), ("dp_shard", "tp"), None),
        ((4, 2), ("other", "tp"), 0),
        ((2, 4), ("tp", "other"), 1),
        ((2, 2, 2), ("dp_replicate", "dp_shard", "tp"), 0),
    ],
    ids=str,
)
def test_the_dimension_that_shrinks_holds_replicas_with_their_own_samples(
    sizes: tuple[int, ...], names: tuple[str, ...], shrinks: int | None
) -> None:
    with alone():
        model = tensor_parallel_model(sizes, names)
        assert regrouping.use_of("model", model, math.prod(sizes)).shrinks == shrinks


def tensor_parallel_model(sizes: tuple[int, ...], names: tuple[str, ...], *, seed: int = 0) -> nn.Sequential:
    """Column and row parallel layers of odd widths and a sequence parallel norm, sharded over what is not "tp"."""
    torch.manual_seed(seed)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 7), nn.Linear(7, 5))
    plan = {"0": SequenceParallel(), "1": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan, src_data_rank=None)
    data = tuple(name for name in names if name.startswith("dp"))
    return fully_shard(model, mesh=mesh[data]) if data else model


@pytest.mark.parametrize(
    ("sizes", "names", "replicates"),
    [
        ((8,), ("tp",), (False,)),
        ((2, 4), ("dp_shard", "tp"), (False, False)),
        ((4, 2), ("other", "tp"), (True, False)),
        ((2, 2, 2), ("dp_replicate", "dp_shard", "tp"), (True, False, False)),
        ((4, 1, 2), ("dp_replicate", "dp_shard", "tp"), (True, False, False)),
    ],
    ids=str,
)
@pytest.mark.parametrize("rank", [0, 5, 7])
def test_tensor_parallel_parameters_and_moments_are_cut_as_torch_does_it(
    sizes: tuple[int, ...], names: tuple[str, ...], replicates: tuple[bool, ...], rank: int
) -> None:
    def moments(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        return [one["exp_avg"]._local_tensor for one in optimizer.state.values()]

    with alone():
        model = tensor_parallel_model(sizes, names)
        state = TorchState(model, optimizer := torch.optim.Adam(model.parameters()), rng="per_step")
        require(model)
        assert state.sharding(8) == Sharding(sizes, replicates)
        for parameter in model.parameters():
            parameter.grad = parameter.detach().clone()
        optimizer.step()
        whole = [one._local_tensor.clone() for one in model.parameters()]  # type: ignore[attr-defined]
        first = [one.clone() for one in moments(optimizer)]
    with world(rank, 8):
        meshes.form_all()
        regrouping.attach([model], [optimizer])
        stock = tensor_parallel_model(sizes, names, seed=1)
        with torch.no_grad():
            for one, other, values, moment in zip(model.parameters(), stock.parameters(), whole, first, strict=True):
                assert one._spec == other._spec and hash(one._spec) == hash(other._spec)  # type: ignore[attr-defined]
                cut = Piece.of(other, "a parameter").cut(values)
                assert torch.equal(one._local_tensor, cut)  # type: ignore[attr-defined]
                assert cut.shape == other._local_tensor.shape  # type: ignore[attr-defined]
                assert torch.equal(optimizer.state[one]["exp_avg"]._local_tensor, Piece.of(other, "").cut(moment))
        contents = copied_tree(state.contents())
        before = locals_of(model)
    with world(rank, 8):
        meshes.form_all()
        regrouping.attach([model], [optimizer])
        groups = [pg for one in model.parameters() for pg in one.device_mesh.get_all_groups()]  # type: ignore[attr-defined]
        assert all(pg in dist.distributed_c10d._world.pg_map for pg in groups)
        for one in model.parameters():
            one._local_tensor.zero_()  # type: ignore[attr-defined]
        state.load(contents, own=True)
        assert all(torch.equal(one, other) for one, other in zip(locals_of(model), before, strict=True))


def test_a_point_that_all_ranks_save_holds_the_whole_tensors() -> None:
    """FSDP2 splits the parts of tensor parallelism once more, along the same dimension."""
    with alone():
        states = []
        for _ in range(4):
            model = tensor_parallel_model((2, 2), ("dp_shard", "tp"))
            states.append(TorchState(model, torch.optim.Adam(model.parameters()), rng="per_step"))
        expected = [one._local_tensor.clone() for one in states[0].model.parameters()]
    contents = []
    for rank, state in enumerate(states):
        with world(rank, 4):
            meshes.form_all()
            regrouping.attach([state.model], [state.optimizer])
            contents.append(copied_tree(state.contents()))
    for order in (contents, contents[::-1]):
        found = whole([order[0]["shared"]["values"]["model"]], [one["own"]["shards"] for one in order], "state.model")
        parameters = [found[name] for name, _ in states[0].model.named_parameters()]
        assert all(torch.equal(one, other) for one, other in zip(parameters, expected, strict=True))
    with pytest.raises(CheckpointError, match="the points of 3 ranks hold"):
        whole([contents[0]["shared"]["values"]["model"]], [one["own"]["shards"] for one in contents[1:]], "state.model")


@pytest.mark.parametrize(
    ("sizes", "names", "places"),
    [
        ((4,), ("tp",), [(0, 1)] * 4),
        ((2, 2), ("dp_shard", "tp"), [(0, 2), (0, 2), (1, 2), (1, 2)]),
        ((2, 2), ("tp", "dp_shard"), [(0, 2), (1, 2), (0, 2), (1, 2)]),
        ((4,), ("dp_shard",), [None] * 4),
        ((4,), ("ep",), [None] * 4),  # expert-parallel: the layers are spread, and so are the samples
        ((2, 2), ("ep", "tp"), [(0, 2), (0, 2), (1, 2), (1, 2)]),
        ((2, 2), ("cp", "dp_shard"), [(0, 2), (1, 2), (0, 2), (1, 2)]),  # parts of the same sequences along "cp"
    ],
    ids=str,
)
def test_ranks_of_one_data_parallel_coordinate_take_the_same_data(
    sizes: tuple[int, ...], names: tuple[str, ...], places: list[tuple[int, int] | None]
) -> None:
    with alone():
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        spread = [name for name in names if name in ("ep", "tp")]
        model: nn.Module = nn.Sequential(*(nn.Linear(4, 4) for _ in spread), nn.Linear(4, 4))
        for number, name in enumerate(spread):
            parallelize_module(model.get_submodule(str(number)), mesh[name], ColwiseParallel())
        if not spread:
            fully_shard(model, mesh=mesh)
        sharded = ShardedValues.of(TorchState(model, torch.optim.SGD(model.parameters(), 0.1)).handlers)
        assert sharded is not None and [sharded.data_place(rank) for rank in range(4)] == places


def test_ranks_over_which_fully_shard_averages_take_their_own_data_also_if_experts_are_spread_over_them() -> None:
    with alone():
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
        model = nn.Sequential(nn.Linear(4, 4), parallelize_module(nn.Linear(4, 4), mesh, ColwiseParallel()))
        fully_shard(model, mesh=mesh, ignored_params=set(model[1].parameters()))
        sharded = ShardedValues.of(TorchState(model, torch.optim.SGD(model.parameters(), 0.1)).handlers)
        assert sharded is not None and [sharded.data_place(rank) for rank in range(4)] == [None] * 4


def test_a_dimension_for_sequences_needs_a_sharded_model() -> None:
    """Without a sharded model, an ElasticSampler would give ranks along the dimension different samples."""
    with alone():
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        model = nn.Linear(4, 4)
        state = TorchState(model, torch.optim.SGD(model.parameters(), 0.1))
        with pytest.raises(UsageError, match=r'2 x 2 \(dp, cp\) has a dimension "cp".*Fix: apply fully_shard'):
            state.bind(SimpleNamespace(), 0)  # type: ignore[arg-type]


def test_ranks_that_hold_the_same_part_are_those_along_the_replicating_dimension() -> None:
    with alone():
        state = sharded_state()
        assert state.sharding(4) == Sharding((4,), (False,))
        hybrid = TorchState(model := mesh_model((2, 3)), torch.optim.Adam(model.parameters()), rng="per_step")
        assert hybrid.sharding(6) == Sharding((2, 3), (True, False))
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for part, sizes in zip(model, ((2, 3), (3, 2)), strict=True):
            fully_shard(part, mesh=init_device_mesh("cpu", sizes, mesh_dim_names=NAMES))
        with pytest.raises(UsageError, match=r"several meshes: 2 x 3 \(dp_replicate, dp_shard\); 3 x 2"):
            TorchState(model, torch.optim.Adam(model.parameters())).sharding(6)


def test_a_replicas_point_is_taken_and_that_of_another_shard_is_refused() -> None:
    def state_of(seed: int) -> TorchState:
        model = sharded_model(seed, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES))
        return TorchState(model, torch.optim.Adam(model.parameters()), rng="per_step")

    with alone():
        holder, lost = state_of(0), state_of(1)
        other = state_of(0)
    contents = []
    for rank, state in ((1, holder), (0, other)):
        with world(rank, 4):
            meshes.form_all()
            regrouping.attach([state.model], [state.optimizer])
            contents.append(copied_tree(state.contents()))
    expected = locals_of(holder.model)
    with world(3, 4):
        meshes.form_all()
        regrouping.attach([lost.model], [lost.optimizer])
        before = locals_of(lost.model)
        with pytest.raises(CheckpointError, match=r"the restore point holds \[0:4.* this rank's part is \[4:7"):
            lost.load(contents[1], own=False)
        assert all(torch.equal(one, two) for one, two in zip(locals_of(lost.model), before, strict=True))
        lost.load(contents[0], own=False)
        assert all(torch.equal(one, two) for one, two in zip(locals_of(lost.model), expected, strict=True))


@pytest.mark.parametrize(
    ("norm", "is_refused"),
    [
        (nn.BatchNorm1d(4), True),
        (nn.BatchNorm1d(4, track_running_stats=False), False),
        (nn.SyncBatchNorm(4), False),
        (nn.LayerNorm(4), False),
    ],
    ids=["statistics", "none", "alike", "other"],
)
def test_statistics_that_no_replica_holds_are_refused(norm: nn.Module, is_refused: bool) -> None:
    with alone():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES)
        model = fully_shard(nn.Sequential(nn.Linear(4, 4), norm), mesh=mesh)
        sharded = ShardedValues.of(TorchState(model, torch.optim.SGD(model.parameters(), 0.1)).handlers)
        assert sharded is not None
        expected = pytest.raises(
            UsageError, match=r"state\.model\.1 \(FSDPBatchNorm1d\)|state\.model\.1 \(BatchNorm1d\)"
        )
        with expected if is_refused else contextlib.nullcontext():
            sharded.require_supported()


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("sizes", [(4,), (2, 4)], ids=str)
def test_resharding_to_fewer_ranks_after_a_forward_pass_uses_the_groups_of_each_generation(
    sizes: tuple[int, ...], rank: int
) -> None:
    def model_of() -> nn.Sequential:
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=NAMES[-len(sizes) :])
        return sharded_model(mesh=mesh, reshard_after_forward=2)

    ranks = math.prod(sizes)
    with alone():
        model = model_of()
        require(model)
    for _ in range(2):  # each generation
        with world(rank, ranks):
            meshes.form_all()
            regrouping.attach([model], [])
            stock = model_of()
            for mine, theirs in zip(
                regrouping.parameter_groups(model), regrouping.parameter_groups(stock), strict=True
            ):
                after, expected = mine.post_forward_mesh_info, theirs.post_forward_mesh_info
                assert after.mesh == expected.mesh and after.shard_mesh_size == 2
                assert after.shard_mesh_rank == expected.shard_mesh_rank
                assert after.shard_process_group in dist.distributed_c10d._world.pg_map
                for one, other in zip(mine.fsdp_params, theirs.fsdp_params, strict=True):
                    stride = "contiguous_sharded_post_forward_stride"
                    assert one.post_forward_mesh_info is after and getattr(one, stride) == getattr(other, stride)
            loss_of(model)  # FSDP2 reshards to the smaller groups


@pytest.mark.parametrize(
    ("sizes", "number", "message"),
    [
        (
            (4,),
            3,
            r"reshard_after_forward=3 does not divide the 4 ranks that the device mesh 4 \(dp_shard\) shards over",
        ),
        (
            (),
            2,
            r"reshard_after_forward=2 needs a whole device mesh, not the default mesh or a slice\. Fix: fully_shard",
        ),
        ((2, 2), 4, r"reshard_after_forward=4 does not divide the 2 ranks .* 2 x 2 \(dp_replicate, dp_shard\)"),
    ],
)
def test_resharding_to_a_number_that_does_not_fit_is_refused(sizes: tuple[int, ...], number: int, message: str) -> None:
    with alone(), pytest.raises(UsageError, match=message):
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=NAMES[-len(sizes) :]) if sizes else None
        sharded_model(mesh=mesh, reshard_after_forward=number)


def test_replicate_reduces_over_the_group_of_each_generation() -> None:
    """FSDP2's ``replicate()`` over the default mesh: a group of one would train every rank on its own data alone."""
    with alone():
        model = replicate(nn.Linear(4, 4))
        require(model)
    for _ in range(2):
        with world(1, RANKS):
            regrouping.attach([model], [])
            (info,) = regrouping._mesh_infos(model)
            assert info.replicate_process_group is dist.group.WORLD
            assert (info.replicate_mesh_size, info.replicate_mesh_rank) == (RANKS, 1)


def test_tensor_parallelism_over_one_rank_declares_its_mesh() -> None:
    with alone():
        model = parallelize_module(nn.Linear(4, 4), init_device_mesh("cpu", (1,)), ColwiseParallel())
        state = TorchState(model, torch.optim.SGD(model.parameters(), 0.1), rng="per_step")
        require(model)
        with pytest.raises(UsageError, match="a device mesh 1 has 1 rank and the job 2 workers"):
            meshes.require_world(2, 2)
    with world():
        meshes.form_all()
        state.enter_group()
        assert model.weight.device_mesh.get_group() in dist.distributed_c10d._world.pg_map  # type: ignore[union-attr]


# --- what is not supported --------------------------------------------------------------------------------------------


def require(model: nn.Module) -> None:
    regrouping.require_supported("model", model, [])


def test_fully_shards_defaults_are_supported() -> None:
    with world():
        require(sharded_model())
        frozen = sharded_model()
        frozen[0].requires_grad_(False)
        require(frozen)


@pytest.mark.filterwarnings("ignore:FSDP is switching")
def test_fsdp1_is_refused() -> None:
    with world():
        model = nn.Sequential(FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu")))
        with pytest.raises(UsageError, match="model is in FullyShardedDataParallel"):
            require(model)


def test_a_mesh_that_was_not_declared_is_refused() -> None:
    with world():
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
        model = fully_shard(nn.Linear(4, 4), mesh=mesh)
        with pytest.raises(
            UsageError,
            match=r"model \(FSDPLinear\) uses a mesh that is a part of another one, or was not built between",
        ):
            require(model)


def test_tensor_parallelism_over_a_mesh_that_was_not_declared_is_refused() -> None:
    with world():
        mesh = init_device_mesh("cpu", (1,))
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fully_shard(model[1])
        parallelize_module(model[0], mesh, ColwiseParallel())
        with pytest.raises(UsageError, match=r"model\.0\.weight is a DTensor over a mesh that was not built between"):
            require(model)


def test_a_global_batch_of_sharded_parameters_is_refused() -> None:
    with world(), pytest.raises(UsageError, match=r"GlobalBatch sums whole gradients.*are sharded.*Fix: leave"):
        GlobalBatch(ElasticSampler(range(8)), sharded_model().parameters(), size=4, micro=2)


def test_manually_distributed_tensor_is_refused() -> None:
    with world():
        model = nn.Linear(4, 4, bias=False)
        mesh = init_device_mesh("cpu", (1,))
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
        with pytest.raises(UsageError, match=r"model\.weight is a DTensor"):
            require(model)
