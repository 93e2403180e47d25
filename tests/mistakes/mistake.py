"""A mistake as a value: the script or environment that makes it, and the message it must lead to.

A row states what is printed and what must not be, so that an unhelpful sentence fails as well as a missing one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.launcher.shell_job import ShellJob

RECOVER = r"recover\.sh"


@dataclass(frozen=True, slots=True)
class Mistake:
    """One row.

    Attributes:
        script: ``train.py``'s text; run by two workers, with recovery on unless the settings say otherwise.
        says: patterns that must each occur in a line of ``run.sh``'s output.
        never: patterns that must not occur.
        status: ``run.sh``'s exit status.
        files: more files of the job's folder.
    """

    name: str
    script: str
    says: tuple[str, ...]
    status: int
    never: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()

    def make(self, job: ShellJob) -> Path:
        """Write its files; return the script."""
        job.settings = {**job.settings, "WORKER_NUM": "2", "NODE_TIMEOUT": "5", **self.settings}
        for name, text in {"train.py": self.script, **self.files}.items():
            path = job.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return job.folder / "train.py"

    def judge(self, status: int, text: str, logs: str) -> None:
        """Check the output."""
        shown = f"status {status}\n{text}\n{logs}"
        assert status == self.status, shown
        for pattern in self.says:
            assert re.search(pattern, text, re.MULTILINE), f"{pattern!r} was not said: {shown}"
        for pattern in self.never:
            assert not re.search(pattern, text, re.MULTILINE), f"{pattern!r} was said: {shown}"
