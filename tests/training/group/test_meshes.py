"""Device meshes that a script builds while its process is alone, and what becomes of them in generations."""

from __future__ import annotations

import contextlib
import gc
import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.experimental import context_parallel

from samebits.errors import UsageError
from samebits.training.group import meshes
from samebits.training.group.meshes import Declared
from tests.training.sharding.worlds import alone, world

NAMES = ("dp_replicate", "dp_shard")


@pytest.mark.parametrize("rank", range(4))
def test_a_mesh_and_its_slices_stay_the_same_objects_and_become_what_torch_would_have_built(rank: int) -> None:
    with alone():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES)
        parts = [mesh[name] for name in NAMES]
    for _ in range(2):  # each generation
        with world(rank, 4):
            meshes.form_all()
            stock = init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES)
            assert type(mesh) is DeviceMesh and mesh == stock and hash(mesh) == hash(stock)
            assert mesh.get_coordinate() == stock.get_coordinate() == (rank // 2, rank % 2)
            for name, part in zip(NAMES, parts, strict=True):
                assert part == stock[name] and part.get_local_rank() == stock[name].get_local_rank()
                assert part.get_group() is mesh.get_group(name)
                assert dist.get_process_group_ranks(part.get_group()) == dist.get_process_group_ranks(
                    stock.get_group(name)
                )


@pytest.mark.parametrize("sizes", [(2, 2), (2, 3), (2, 1, 3), (6,)])
def test_groups_of_a_rank_are_known_before_the_mesh_is_built(sizes: tuple[int, ...]) -> None:
    size = math.prod(sizes)
    with alone():
        mesh = init_device_mesh("cpu", sizes)
    for rank in range(size):
        ahead = meshes.groups_of(rank, size)
        assert meshes.groups_of(rank, size + 1) == []
        with world(rank, size):
            meshes.form_all()
            built = [tuple(dist.get_process_group_ranks(one)) for one in mesh.get_all_groups()]
        assert ahead == (built if len(sizes) > 1 else [])  # torch uses the default group


def test_a_mesh_that_the_script_drops_is_declared_all_the_same() -> None:
    """Whether the collector has found it may differ between ranks, and they would be refused as unequal."""
    with alone():
        init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES)
        gc.collect()
        assert meshes.declared() == [Declared((2, 2), NAMES)]
    with world(0, 4):
        meshes.form_all()
        assert len(dist.distributed_c10d._world.pg_map) == 3  # the default group's, and one for each dimension


def test_a_slice_of_all_dimensions_has_the_groups_of_the_present_generation() -> None:
    """FSDP2 concatenates its slice with that of tensor parallelism."""
    with alone():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES)
        joined = DeviceMesh._concatenate([mesh[NAMES[0]], mesh[NAMES[1]]])
    for _ in range(2):
        with world(0, 4):
            meshes.form_all()
            assert joined.get_all_groups() == mesh.get_all_groups() and meshes.root_of(joined) is mesh


@pytest.mark.parametrize(("rank", "place"), [(0, (0, 0)), (1, (0, 1)), (3, (1, 1))])
def test_a_mesh_has_as_many_replicas_as_the_generation(rank: int, place: tuple[int, int]) -> None:
    with alone():
        mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=NAMES)
        meshes.let_shrink(mesh, 0)
        meshes.require_world(2, 6)
        part = mesh["dp_shard"]
    for ranks in (6, 4, 6):
        with world(rank, ranks):
            meshes.form_all()
            stock = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=NAMES)
            assert mesh == stock and hash(mesh) == hash(stock) and part == stock["dp_shard"]
            assert mesh.get_coordinate() == place and meshes.place_in(mesh) == place[1:]
            assert str(meshes.declaration_of(mesh)) == "3 x 2 (dp_replicate, dp_shard)"
    with world(0, 5), pytest.raises(UsageError, match="5 ranks cannot fill the device mesh 3 x 2"):
        meshes.form_all()


def test_only_one_mesh_may_shrink() -> None:
    with alone():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES)
        init_device_mesh("cpu", (4,), mesh_dim_names=("other",))
        with pytest.raises(UsageError, match=r"mesh 4 \(other\) is not the one .*2 x 2.*Fix: leave out MIN_WORKER_NUM"):
            meshes.let_shrink(mesh, 0)


def test_groups_are_new_in_each_generation_and_the_old_ones_are_handed_out_to_be_freed() -> None:
    with alone():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES)
    with world(0, 4):
        meshes.form_all()
        first = mesh.get_group("dp_shard")
    with world(0, 4):
        held = meshes.form_all()
        assert mesh.get_group("dp_shard") is not first
        assert any(first in one["_pg_registry"].values() for one in held)


@pytest.mark.parametrize(
    "call",
    [
        lambda mesh: mesh.size(),
        lambda mesh: mesh.shape,
        lambda mesh: mesh.mesh,
        lambda mesh: mesh.get_rank(),
        lambda mesh: mesh.get_local_rank("dp_shard"),
        lambda mesh: mesh.get_coordinate(),
        lambda mesh: mesh["dp_shard"].size(),
        lambda mesh: mesh.get_group("dp_shard"),
    ],
    ids=["size", "shape", "mesh", "rank", "local", "coordinate", "slice", "group"],
)
def test_no_script_takes_its_place_in_a_mesh_for_the_jobs_before_there_is_one(call: object) -> None:
    assert callable(call)
    with alone():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES)
        with pytest.raises(
            UsageError, match=r"test_meshes\.py:\d+.*before samebits\.elastic\.run.*Fix: call it inside"
        ):
            call(mesh)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: DeviceMesh("cpu", [[1, 0], [2, 3]], mesh_dim_names=NAMES), r"2 x 2 of ranks \(1, 0, 2, 3\)"),
        (lambda: DeviceMesh("cpu", [2, 3]), r"a device mesh 2 of ranks \(2, 3\)"),
        (lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES)._flatten("both"), r"flattened.*\(both\)"),
        (
            lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES, backend_override={0: "gloo"}),
            "with a backend_override",
        ),
    ],
    ids=["order", "part", "flattened", "options"],
)
def test_object_that_could_not_be_rebuilt_identically_is_refused(build: object, message: str) -> None:
    assert callable(build)
    with alone(), pytest.raises(UsageError, match=message):
        build()


@pytest.mark.parametrize(
    ("sizes", "least", "most", "message"),
    [
        ((2, 2), 4, 4, ""),
        ((2, 2), 2, 4, r"MIN_WORKER_NUM=2 and MAX_WORKER_NUM=4.*2 x 2 \(dp_replicate, dp_shard\)"),
        ((2, 2), 8, 8, r"2 x 2 .* has 4 ranks and the job 8 workers"),
    ],
)
def test_a_mesh_has_all_ranks_of_a_job_of_fixed_size(
    sizes: tuple[int, int], least: int, most: int, message: str
) -> None:
    with alone():
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=NAMES)
        assert meshes.declared()[-1] == meshes.declaration_of(mesh)
        with pytest.raises(UsageError, match=message) if message else contextlib.nullcontext():
            meshes.require_world(least, most)


def test_a_mesh_that_was_built_inside_an_earlier_call_names_its_end() -> None:
    with alone():
        kept = init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES)
    with world(0, 4):
        meshes.form_all()
        passing = init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES)
        assert passing.get_group("dp_shard") is not kept.get_group("dp_shard")
    with world(0, 4):
        meshes.form_all()
        with pytest.raises(RuntimeError, match="a device mesh that was built in an earlier call of the function"):
            passing.get_group("dp_shard")
        kept.get_group("dp_shard")


def test_torchs_context_parallel_is_refused_on_the_cpu_before_it_changes_a_tensor() -> None:
    with alone():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    with world(0, 2):
        meshes.form_all()
        sequences = torch.ones(1, 8, 4)
        refused = pytest.raises(UsageError, match=r"test_meshes.py:\d+: torch's context_parallel\(\) has no attention")
        with refused, context_parallel(mesh, buffers=[sequences], buffer_seq_dims=[1]):
            raise AssertionError("its attention has no operator here")
        assert sequences.shape == (1, 8, 4)
