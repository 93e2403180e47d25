"""A job with spares or a changing world size: which nodes exist, which are gone for good, and how it ends.

A test names nodes; a node's rank, and whether it is a spare, changes.
"""

from __future__ import annotations

import re
import signal
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.system.job import FINISH_S, WAIT_S, Job
from tests.system.processes import Starter

SAMPLES_PROBE = Path(__file__).with_name("samples_probe.py")

_BEGINS = re.compile(r"generation (\d+): rank \d+ of (\d+) (begins at|continues from) step (\d+)")
_TOOK = re.compile(r"epoch (\d+) step (\d+) of (\d+) lr (\S+) samples (\S+)")
_FINAL = re.compile(r"final step=(\d+) .*?sha256=([0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class Taken:
    """One committed step of one node and the samples it used."""

    generation: int
    epoch: int
    step: int
    world_size: int
    rate: float
    samples: tuple[int, ...]


class ElasticJob(Job):
    """A job of ``workers`` nodes and ``spares``; nodes from WORKER_NUM to MAX_WORKER_NUM join later."""

    def __init__(
        self, folder: Path, starter: Starter, *, workers: int = 4, spares: int = 0, most: int = 0, **options: object
    ) -> None:
        settings = {"SPARE_NUM": str(spares), "MAX_WORKER_NUM": str(most or workers)}
        settings |= options.pop("settings", {})  # type: ignore[call-overload]
        super().__init__(folder, starter, workers=workers, settings=settings, **options)  # type: ignore[arg-type]
        self.spares = range(most or workers, (most or workers) + spares)
        self.gone: set[int] = set()

    def start(self) -> None:
        super().start()
        for node in self.spares:
            self.start_worker(node)

    def start_worker(self, rank: int, **more: str) -> None:
        self.gone.discard(rank)
        super().start_worker(rank, **more)

    def kill(self, *ranks: int) -> None:
        super().kill(*ranks)
        self.gone |= set(ranks)

    def wait_died(self, node: int) -> None:
        """Wait until this node has ended itself (``--die``)."""
        self.wait_killed(node)
        self.gone.add(node)

    def terminate(self, node: int) -> int:
        """Send SIGTERM; return how the process ends."""
        self.gone.add(node)
        self.worker(node).signal(signal.SIGTERM)
        return self.worker(node).wait(WAIT_S)

    @property
    def nodes(self) -> list[int]:
        """Return the nodes whose process should reach the job's end."""
        return sorted(self._workers.keys() - self.gone)

    def wait_for_step(self, step: int, rank: int = 0, *, since: int = 0, timeout_s: float = WAIT_S) -> None:
        """Wait until this node has printed a step from ``step`` on, whichever probe it runs."""
        self.wait_until(
            lambda: any(int(one[1]) >= step for one in self.matches(rank, r"^epoch \d+ step (\d+) ", since)) or None,
            f"step {step} of node {rank}",
            timeout_s,
        )

    def wait_warm(self, *nodes: int) -> None:
        """Wait until these spares are waiting."""
        for node in nodes:
            self.wait_for(node, "this spare is warm")

    def wait_generation(self, number: int, nodes: Iterable[int]) -> None:
        """Wait until the generation has begun in all of these."""
        for node in nodes:
            self.wait_for(node, rf"generation {number}: rank \d+ of \d+ ")

    def finish(self, timeout_s: float = FINISH_S) -> str:
        """Return the common sha256 of all ranks, once every process, spares included, has exited with 0."""
        statuses = {node: self.worker(node).wait(timeout_s) for node in self.nodes}
        statuses[-1] = self.scheduler.wait(timeout_s)
        failed = {node: status for node, status in statuses.items() if status}
        assert not failed, f"exit statuses {failed}\n{self.tails()}"
        outside = "this spare was not needed|training has finished without this worker"
        ranks = [node for node in self.nodes if not self.matches(node, outside)]
        hashes = {node: self.matches(node, _FINAL.pattern)[-1][2] for node in ranks}
        assert len(set(hashes.values())) == 1, f"the nodes end with different weights: {hashes}\n{self.tails()}"
        return next(iter(hashes.values()))

    def seated_once(self, *nodes: int) -> bool:
        """Return whether none of these processes was ever replaced."""
        return all(len(self.matches(node, "seated: ")) == 1 for node in nodes)

    # ---- training data

    def taken(self, node: int) -> list[Taken]:
        """Return every step this node committed, in order, abandoned lines included."""
        found, generation = [], 0
        for line in self.lines(node):
            if (begins := _BEGINS.search(line)) is not None:
                generation = int(begins[1])
            elif (took := _TOOK.search(line)) is not None:
                samples = tuple(int(number) for number in took[5].split(","))
                found.append(Taken(generation, int(took[1]), int(took[2]), int(took[3]), float(took[4]), samples))
        return found

    def kept(self) -> dict[int, list[Taken]]:
        """Return for each step what its last generation used, over all nodes."""
        by_step: dict[int, list[Taken]] = defaultdict(list)
        for node in self._workers:
            for taken in self.taken(node):
                by_step[taken.step].append(taken)
        return {
            step: [one for one in all_ if one.generation == max(other.generation for other in all_)]
            for step, all_ in sorted(by_step.items())
        }

    def sizes(self) -> list[int]:
        """Return the world sizes that trained, in order without repeats."""
        sizes = [steps[0].world_size for steps in self.kept().values()]
        return [size for before, size in zip([0, *sizes], sizes, strict=False) if size != before]

    def require_each_sample_once(self, samples: int, most: int, is_whole: Callable[[int], bool]) -> None:
        """Check that each complete epoch used every sample once, apart from the padding of its last round."""
        epochs: dict[int, Counter[int]] = defaultdict(Counter)
        for step, all_ in self.kept().items():
            assert {one.world_size for one in all_} == {len(all_)}, f"step {step}: {all_}"
            for one in all_:
                epochs[one.epoch].update(one.samples)
        for epoch, seen in epochs.items():
            if is_whole(epoch):
                assert set(seen) == set(range(samples)), f"epoch {epoch} left out {set(range(samples)) - set(seen)}"
                assert seen.total() - samples < most, f"epoch {epoch} repeats {seen.most_common(most)}"
