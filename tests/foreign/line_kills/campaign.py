"""Draw kills, run each, and judge how it ended.

A script's undisturbed run gives its bits, and how often each node executes each line; kills are drawn from these.
Killed processes are restarted, as by a supervisor.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.foreign.kill_campaign import Verdict
from tests.foreign.line_kills import at_line
from tests.system.elastic_job import ElasticJob
from tests.system.processes import REPOSITORY, WarmStarter

_HERE = Path(__file__).parent
_EXAMPLES = REPOSITORY / "examples"
SCRIPTS: dict[Path, tuple[str, ...]] = {
    **dict.fromkeys(sorted((_HERE / "scripts").glob("*.py")), ()),
    _EXAMPLES / "frameworks" / "classifier_loop.py": ("--epochs", "2", "--pictures", "320"),
    _EXAMPLES / "frameworks" / "accelerate_loop.py": ("--epochs", "2"),
    _EXAMPLES / "frameworks" / "fabric_loop.py": ("--epochs", "2"),
    _EXAMPLES / "frameworks" / "lightning_trainer.py": (),
    _EXAMPLES / "frameworks" / "transformers_trainer.py": ("--epochs", "2"),
}
"""Each script with its arguments."""
WORKERS = 2
_END_S = 120.0


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill: of this node, when it is about to execute this line for the ``number``-th time."""

    script: Path
    spares: int
    node: int
    line: int
    number: int

    def __str__(self) -> str:
        text = self.script.read_text(encoding="utf-8").splitlines()[self.line - 1].strip()
        of = f"{self.node}:{self.line}:{self.number}"
        return f"{self.script.stem} {of} spares {self.spares} ({text[:60]})"


class LineKills:
    """Jobs of the scripts in folders below this one."""

    def __init__(self, folder: Path, starter: WarmStarter, scripts: list[Path]) -> None:
        self._folder = folder
        self._scripts = scripts
        self._starter = starter
        self._number = 0
        self._bits: dict[Path, str] = {}
        self._counts: dict[tuple[Path, int], dict[int, dict[int, int]]] = {}

    def draws(self, chance: random.Random) -> Iterator[Kill]:
        """Yield kills endlessly: the scripts in turn, everything else random."""
        while True:
            for script in self._scripts:
                spares = chance.randrange(2)
                counts = self._counts_of(script, spares)
                node = chance.choice(sorted(counts))
                line = chance.choice(sorted(counts[node]))
                yield Kill(script, spares, node, line, chance.randint(1, counts[node][line]))

    def run(self, kill: Kill) -> Verdict:
        """Run one job with this kill; its folder stays if the outcome is wrong."""
        expected = self._bits[kill.script]
        job = self._job(kill.script, kill.spares, f"{kill.node}:{kill.line}:{kill.number}")
        try:
            job.start()
            mark = job.folder / at_line.MARK
            job.wait_until(
                lambda: True if mark.exists() or not job.scheduler.is_alive() else None, "kill or end", _END_S
            )
            if not mark.exists():
                return Verdict("not reached")
            job.wait_killed(kill.node)
            job.start_worker(kill.node)
            return self._judge(job, kill, expected)
        except (AssertionError, TimeoutError) as error:
            return Verdict("ENDLESS", str(error).splitlines()[0])
        finally:
            job.end()

    def _judge(self, job: ElasticJob, kill: Kill, expected: str) -> Verdict:
        statuses = {"scheduler": job.scheduler.wait(_END_S)}
        for node in (*job.ranks, *job.spares):
            if node == kill.node:
                job.wait_until(lambda: self._is_through(job, kill.node), f"end of {node}", _END_S)
                job.worker(node).kill()  # bounds the wait, in case the job is over
            else:
                statuses[str(node)] = job.worker(node).wait(_END_S)
        finals = [found[-1] for node in job.nodes if (found := job.finals_of(job.log(node)))]
        if any(statuses.values()):
            sentences = [found[1] for found in job.matches("scheduler", "(the job ends: .*)")]
            return Verdict("refused", sentences[-1]) if sentences else Verdict("NO SENTENCE", f"{statuses}")
        if set(finals) - {expected}:
            return Verdict("OTHER BITS", f"{finals}, expected {expected}")
        if len(finals) < WORKERS:
            return Verdict("SILENT", f"{len(finals)} ranks have a result")
        return Verdict("same bits")

    @staticmethod
    def _is_through(job: ElasticJob, node: int) -> bool | None:
        """Return whether a killed node's new process has ended, or came when the job was over."""
        is_late = job.lines(node) and "waiting for the scheduler at" in job.lines(node)[-1]
        return True if is_late or not job.worker(node).is_alive() else None

    def _counts_of(self, script: Path, spares: int) -> dict[int, dict[int, int]]:
        """Return how often each node executes each line of the undisturbed run."""
        if (script, spares) not in self._counts:
            job = self._job(script, spares, "")
            job.start()
            bits = job.finish() if not spares else self._finish_with_spares(job)
            assert self._bits.setdefault(script, bits) == bits, f"{script}: two undisturbed runs differ"
            counts = {}
            for node in (*job.ranks, *job.spares):
                path = at_line.counts_path(job.folder, str(node))
                read = json.loads(path.read_text()) if path.exists() else {}
                counts[node] = {int(line): number for line, number in read.items()}
            self._counts[script, spares] = {node: lines for node, lines in counts.items() if lines}
            job.end()
            shutil.rmtree(job.folder)
        return self._counts[script, spares]

    @staticmethod
    def _finish_with_spares(job: ElasticJob) -> str:
        assert not any(job.wait_ended().values()), job.tails()
        (bits,) = {job.finals_of(job.log(node))[-1] for node in job.ranks}
        return bits

    def _job(self, script: Path, spares: int, kill: str) -> ElasticJob:
        self._number += 1
        folder = self._folder / f"{self._number}-{script.stem}"
        folder.mkdir()
        return ElasticJob(
            folder,
            self._starter,
            script=Path(at_line.__file__),
            args=(str(script), str(folder), *([kill] if kill else []), "--", *SCRIPTS[script]),
            workers=WORKERS,
            spares=spares,
            settings={"REGISTER_COOLDOWN": "1"},
        )

    def forget(self) -> None:
        """Remove the folder of the newest job."""
        for folder in self._folder.glob(f"{self._number}-*"):
            shutil.rmtree(folder)
