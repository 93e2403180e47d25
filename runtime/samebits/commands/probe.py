"""``samebits probe``: report to Kubernetes whether the process that writes PROBE_FILE is alive, or ready."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from samebits import config
from samebits.errors import SettingsError
from samebits.store import probe_note

_QUESTIONS = {"alive": probe_note.is_alive, "ready": probe_note.is_ready}


def main(arguments: Sequence[str]) -> int:
    """Run the subcommand, and return 0 for yes or 1 for no.

    Raises:
        SettingsError: PROBE_FILE is not set.
        StoreError: the file does not contain a valid state.
    """
    parser = argparse.ArgumentParser(
        prog="samebits probe",
        description="Report whether the process that writes PROBE_FILE is alive (it runs and wrote in the last "
        f"{probe_note.SILENT_S:g} s, or has ended by itself) or ready (a worker has its seat; a scheduler serves). "
        "Exits with 0 for yes and 1 for no. Does not contact any other process.",
    )
    parser.add_argument("question", choices=sorted(_QUESTIONS))
    options = parser.parse_args(arguments)
    path = config.read(role_required=False)[0].probe_file
    if path is None:
        raise SettingsError(
            [
                "PROBE_FILE is not set: expected the file that the process writes. Fix: export the same PROBE_FILE, "
                "such as /run/probe, for the process and for this command"
            ]
        )
    note = probe_note.read(path)
    lives = note is not None and note.identity.is_alive()
    yes, why = _QUESTIONS[options.question](note, lives, time.monotonic())
    print(f"samebits: {why}")
    return 0 if yes else 1
