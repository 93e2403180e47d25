"""The table of targets: name → what checks one input, and good inputs to begin with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tests.fuzz import decoder, environment, journal_file, manifest


@dataclass(frozen=True, slots=True)
class Target:
    """``check`` raises for a defect, and for nothing else."""

    check: Callable[[bytes], None]
    seeds: Callable[[], Iterable[bytes]]


TARGETS = {
    "decoder": Target(decoder.check, decoder.seeds),
    "journal": Target(journal_file.check, journal_file.seeds),
    "manifest": Target(manifest.check, manifest.seeds),
    "settings": Target(environment.check, environment.seeds),
}
