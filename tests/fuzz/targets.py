"""The table of targets: name → the check of one input, and good initial inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tests.fuzz import decoder, environment, journal_file, manifest


@dataclass(frozen=True, slots=True)
class Target:
    """``check`` raises only for a defect."""

    check: Callable[[bytes], None]
    seeds: Callable[[], Iterable[bytes]]


TARGETS = {
    "decoder": Target(decoder.check, decoder.seeds),
    "journal": Target(journal_file.check, journal_file.seeds),
    "manifest": Target(manifest.check, manifest.seeds),
    "settings": Target(environment.check, environment.seeds),
}
