"""``samebits.status()``: this process's place in its job, as values, and as a table where a notebook shows it.

Only what this process knows by itself lives here: nobody is asked, so it costs nothing and works while no scheduler
answers. ``samebits status`` asks about the others.
"""

from __future__ import annotations

import dataclasses
import html
from dataclasses import dataclass

from samebits.training.process import context

__all__ = ["JobStatus", "status"]


@dataclass(frozen=True, slots=True)
class JobStatus:
    """One moment of one process.

    Attributes:
        job: the job's id.
        name: JOB_NAME.
        node: this process's NODE_ID.
        incarnation: how often this node was admitted.
        rank: in the present generation, or the one its seat will have; None of a spare.
        local_rank: among the workers of this host.
        world_size: workers of the generation, or of the job before the first one.
        generation: 0 before the first.
        step: the last commit of this process.
        device: what it trains on.
        is_alone: it is a world of one, with its scheduler inside.
        is_finished: training is finished.
    """

    job: str
    name: str
    node: str
    incarnation: int
    rank: int | None
    local_rank: int
    world_size: int
    generation: int
    step: int
    device: str
    is_alone: bool
    is_finished: bool

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th>{field.name}</th><td>{html.escape(str(getattr(self, field.name)))}</td></tr>"
            for field in dataclasses.fields(self)
        )
        return f"<table>{rows}</table>"


def status() -> JobStatus:
    """This process's place in its job now.

    Raises:
        UsageError: before :func:`samebits.init`.
    """
    process = context.current("samebits.status()")
    generation = process.generation
    is_finished = process.is_over or process.ending.is_through
    return JobStatus(
        job=process.admitted.job,
        name=process.job_name,
        node=process.agent.node,
        incarnation=process.admitted.incarnation,
        rank=generation.rank if generation is not None else process.admitted.slot,
        local_rank=context.get_local_rank(),
        world_size=context.get_world_size(),
        generation=generation.generation if generation is not None else 0,
        step=process.agent.step,
        device=str(process.device),
        is_alone=process.ending.scheduler is not None,
        is_finished=is_finished,
    )
