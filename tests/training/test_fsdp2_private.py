"""Private FSDP2 interfaces that vary between torch versions exist and do what ``fsdp2_private`` says."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState, _get_module_fsdp_state

from samebits.training import fsdp2_private
from samebits.training.sharding import regrouping
from tests.training.sharding.worlds import loss_of, sharded_model, world


def fsdp_states(model: nn.Module) -> list[FSDPState]:
    found = [_get_module_fsdp_state(one) for one in model.modules()]
    return [state for state in found if state is not None]


def test_sharded_model_has_its_groups_and_no_mesh_of_another_kind() -> None:
    with world():
        states = fsdp_states(sharded_model())
        groups = [group for state in states for group in fsdp2_private.groups_of(state)]
        assert [len(group.fsdp_params) for group in groups] == [4, 2]
        for group in groups:
            assert not fsdp2_private.is_part_of_larger_mesh(group.mesh_info)
            assert not fsdp2_private.has_reduce_scatter_group(group.mesh_info)


def test_parameter_is_cut_from_a_whole_one_and_keeps_its_identity() -> None:
    with world():
        (param, *_) = fsdp2_private.groups_of(fsdp_states(sharded_model())[0])[0].fsdp_params
        number, before = vars(param).get("_orig_param_uid"), param.sharded_param
        whole = nn.Parameter(torch.arange(28.0).reshape(7, 4))
        fsdp2_private.cut_parameter(param, whole)
        assert param.sharded_param is not before and vars(param).get("_orig_param_uid") == number
        assert torch.equal(param.sharded_param._local_tensor, whole)
        assert param.sharded_param._spec.placements == (param.fsdp_placement,)


def test_parameter_keeps_the_dtype_of_its_gradient() -> None:
    with world():
        whole = nn.Linear(4, 4)
        if hasattr(whole.weight, "grad_dtype"):
            whole.weight.grad_dtype = torch.float64
        (param, *_) = fsdp2_private.groups_of(fsdp_states(fully_shard(whole))[0])[0].fsdp_params
        noted = {name: vars(param)[name] for name in vars(param) if "grad_dtype" in name}
        fsdp2_private.cut_parameter(param, nn.Parameter(torch.zeros(4, 4)))
        assert {name: vars(param)[name] for name in noted} == noted


def test_mesh_accepts_and_returns_another_group() -> None:
    with world():
        mesh = fsdp2_private.groups_of(fsdp_states(sharded_model())[0])[0].mesh_info.mesh
        before = mesh.get_group()
    with world():
        fsdp2_private.give_mesh_group(mesh, dist.group.WORLD)
        assert mesh.get_group() is dist.group.WORLD is not before
        held = fsdp2_private.groups_held_by(mesh)
        assert held is None or list(held.values()) == [dist.group.WORLD]


@pytest.mark.parametrize("by_hand", [False, True])
def test_interrupted_iteration_leaves_nothing(by_hand: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if by_hand:
        monkeypatch.delattr(FSDPState, "_reset_iter_state", raising=False)
    with world():
        model, undisturbed = sharded_model(), sharded_model()
        loss_of(undisturbed, 1).backward()

        def cut_off(*_: object) -> None:
            raise ConnectionError("a peer is gone")

        handle = model[0].register_forward_hook(lambda module, inputs, output: output.register_hook(cut_off) and None)
        with pytest.raises(ConnectionError):
            loss_of(model, 0).backward()
        handle.remove()
        root, below = fsdp_states(model)
        groups = [group for state in (root, below) for group in fsdp2_private.groups_of(state)]
        assert any(not group.is_sharded for group in groups) and root._state_ctx.post_backward_final_callback_queued
        regrouping.reset(model)  # the gradients, then everything else by the probed function
        assert all(group.is_sharded and not group._post_forward_indices for group in groups)
        assert not root._state_ctx.post_backward_final_callback_queued and root._state_ctx.iter_forward_root is None
        loss_of(model, 1).backward()
        for one, other in zip(model.parameters(), undisturbed.parameters(), strict=True):
            assert torch.equal(one.grad._local_tensor, other.grad._local_tensor)  # type: ignore[union-attr]
