"""``samebits.status()``: this process's place in its job as values, shown as a table in a notebook.

It returns only what this process knows: it contacts no other process, and works without a scheduler. ``samebits
status`` reports on the other processes.
"""

from __future__ import annotations

import dataclasses
import html
from dataclasses import dataclass

from samebits.training.process import context

__all__ = ["JobStatus", "status"]


@dataclass(frozen=True, slots=True)
class JobStatus:
    """This process's place in its job at one moment; :func:`status` returns it.

    A notebook shows it as a table.

    Attributes:
        job: the job's id.
        name: JOB_NAME.
        node: this process's NODE_ID.
        incarnation: number of this node's admissions so far, from 1.
        rank: the rank that :func:`get_rank` returns; None in a spare.
        local_rank: index among the workers on this host.
        world_size: workers in the generation; before the first generation, in the job.
        generation: number of the generation; 0 before the first.
        step: step of this process's last commit.
        device: training device, such as ``cpu`` or ``cuda:0``.
        is_alone: whether this is a single-worker job that includes its scheduler.
        is_finished: whether training has finished.
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
    """Return this process's current place in its job, without contacting another process.

    Raises:
        UsageError: called before :func:`samebits.init`.

    Example::

        here = samebits.status()
        print(f"rank {here.rank} of {here.world_size}, step {here.step}")
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
