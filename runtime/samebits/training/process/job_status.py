"""``samebits.status()``: this process's place in its job as values, shown as a table in a notebook.

It returns only what this process knows: it contacts no other process, and works without a scheduler. ``samebits
status`` reports on the other processes.
"""

from __future__ import annotations

import dataclasses
import html
import math
from dataclasses import dataclass
from typing import Any

from samebits.core.reports import MAX_FIGURE_CHARS, MAX_FIGURES, MEASURED, Figure
from samebits.errors import UsageError
from samebits.training.process import context


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


MOST = MAX_FIGURES - len(MEASURED)


def report(**figures: Any) -> None:
    """Publish numbers that this worker measures.

    The numbers appear in ``samebits status --json`` and in the page's metrics.
    ``samebits autoscale --queue-per-worker`` resizes the job by ``queue``, the total number of waiting items for all
    workers; if several workers report ``queue``, the number from the lowest slot counts. A name keeps its last number
    until it is reported again.

    Args:
        figures: finite numbers or one-element tensors, by name; at most 14 names. Reading a tensor on an accelerator
                waits for the device.

    Raises:
        UsageError: called before :func:`samebits.init`, there are too many names, or a value is not a finite number.

    Example::

        samebits.report(queue=12, tokens_per_second=8100.5)
    """
    agent = context.current("samebits.report()").agent
    known = {one.name: one for one in agent.figures}
    for name, given in figures.items():
        if name in MEASURED or len(name) > MAX_FIGURE_CHARS or not name.isprintable():
            raise UsageError(
                f"samebits.report({name[:80]!r}): the worker measures {' and '.join(MEASURED)} by itself, and a name "
                f"has at most {MAX_FIGURE_CHARS} characters. Fix: report it under another name"
            )
        try:
            value = float(given)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise UsageError(f"samebits.report({name}=…): it is not a number ({error}). Fix: pass one number") from None
        if not math.isfinite(value):
            raise UsageError(f"samebits.report({name}={value}): expected a finite number. Fix: leave it out")
        known[name] = Figure(name, value)
    if len(known) > MOST:
        raise UsageError(
            f"samebits.report: found {len(known)} names, expected at most {MOST}. Fix: report only figures that "
            "decide the job's size"
        )
    agent.figures = tuple(known.values())
