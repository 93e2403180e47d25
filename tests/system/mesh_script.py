"""The example of a device mesh, with kills at exact points of a step.

``mesh_script.py [--kill RANK:POINT:STEP …] [--marks FOLDER] the example's own arguments``
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import samebits
from examples.mesh import train as example
from tests.system.kill_points import KillPoints

WITHIN_S, POLL_S = 120.0, 0.002


def follow(points: KillPoints, kills: list[str], marks: Path) -> None:
    """Have the points of a step reached in the example's own calls."""
    stepped_at = {int(one.split(":")[2]) for one in kills if one.split(":")[1] in ("stepped", "committed")}
    commit, begin = samebits.elastic.TorchState.commit, samebits.elastic.TorchState.begin
    step_of = [0]
    hooked: set[int] = set()

    def hook(state: samebits.elastic.TorchState) -> None:
        def forward(_: object, __: object, output: torch.Tensor) -> None:
            points.here("forward", step_of[0] + 1)
            if output.requires_grad:  # a pipeline infers its shapes without gradients
                output.register_hook(lambda _: points.here("backward", step_of[0] + 1))  # later blocks are reduced

        stages = state.model if isinstance(state.model, torch.nn.ModuleList) else [state.model]
        for part in stages:
            part.blocks[0].register_forward_hook(forward)
        # Called after SameBits' own hook, which waits for the gradients of all replicas.
        state.optimizer.register_step_pre_hook(lambda *_: points.here("stepping", step_of[0] + 1))

    def killed_commit(state: samebits.elastic.TorchState) -> None:
        step = state.completed_steps
        if step in stepped_at:
            wait_until_all_have_stepped(marks, step)
        points.here("stepped", step)
        step_of[0] = step
        commit(state)
        points.here("committed", step)
        print(f"epoch {state.epoch} step {step} loss 0 at 0", flush=True)

    def known_begin(state: samebits.elastic.TorchState, point: Any) -> None:
        begin(state, point)
        step_of[0] = state.completed_steps
        if id(state) not in hooked:
            hooked.add(id(state))
            hook(state)

    samebits.elastic.TorchState.commit = killed_commit  # type: ignore[method-assign]
    samebits.elastic.TorchState.begin = known_begin  # type: ignore[method-assign]


def wait_until_all_have_stepped(marks: Path, step: int) -> None:
    """A rank that dies while another waits for all gradients may leave their shards at different steps."""
    (marks / f"stepped-{step}-{samebits.get_rank()}").touch()
    deadline = time.monotonic() + WITHIN_S
    while len(list(marks.glob(f"stepped-{step}-*"))) < samebits.get_world_size():
        assert time.monotonic() < deadline, "a rank has not taken the step"
        time.sleep(POLL_S)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kill", action="append", default=[], metavar="RANK:POINT:STEP")
    parser.add_argument("--marks", type=Path, default=Path(), help="where a kill that has happened is marked")
    args, rest = parser.parse_known_args()
    sys.argv[1:] = rest
    points = KillPoints(args.kill, args.marks)
    points.install()
    follow(points, args.kill, args.marks)
    init = samebits.init

    def init_all() -> None:
        init()
        if not dist.is_initialized():  # ENABLE_RECOVERY=0
            dist.init_process_group()

    samebits.init = init_all
    torch.use_deterministic_algorithms(True)
    example.main()


if __name__ == "__main__":
    main()
