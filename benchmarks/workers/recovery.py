"""A worker of ours that trains until it is killed, and notes what it goes through on its way back.

The script part is what a user writes; the probes around it are on the methods through which a recovery passes.
"""

from __future__ import annotations

from typing import Any

import runtime
from benchmarks.moments import Notebook, before_and_after
from benchmarks.workers.mlp import SEED, Mlp
from runtime.service.agent import Agent
from runtime.training.group import Group

CHECKPOINT_STEPS = 10


def main() -> None:
    notebook = Notebook.from_environment()
    _probe(notebook)

    runtime.init()
    mlp = Mlp()
    state = runtime.elastic.TorchState(
        mlp.model,
        mlp.optimizer,
        rng="per_step",
        seed=SEED,
        checkpoint=runtime.CheckpointConfig(save_checkpoint_steps=CHECKPOINT_STEPS, keep_checkpoint_max=2),
    )

    @runtime.elastic.run
    def train(state: runtime.elastic.TorchState) -> None:
        notebook.note("trains", state.completed_steps)
        while True:
            mlp.step(state.completed_steps)
            state.commit()
            notebook.note("stepped", state.completed_steps)

    train(state)


def _probe(notebook: Notebook) -> None:
    def noting(name: str) -> Any:
        return lambda *_, **__: notebook.note(name)

    def noting_of_generation(name: str) -> Any:
        return lambda group, *_, **__: notebook.note(name) if group.world_size > 1 else None

    before_and_after(Agent, "register", noting("asks"), noting("seated"))
    before_and_after(Agent, "enter", noting("enters"), noting("placed"))
    before_and_after(Agent, "report_failure", noting("failed"), _nothing)
    before_and_after(Group, "break_", noting_of_generation("told"), _nothing)
    before_and_after(Group, "form", _nothing, noting_of_generation("formed"))


def _nothing(*_: object, **__: object) -> None:
    """The other side of a probe is of no interest."""


if __name__ == "__main__":
    main()
