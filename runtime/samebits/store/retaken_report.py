"""Store the results of repeated steps in LOG_DIR.

Rank 0 writes them; ``run --check`` and ``drill`` read them.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from samebits import strict_json
from samebits.errors import StoreError
from samebits.store import durable

_FILE = "check.json"


class RetakenReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The findings of a check so far.

    Attributes:
        steps: the step up to which the script has trained.
        equal: the steps whose results were bit-identical each time.
        restarted: the steps whose results were also bit-identical in new processes.
        skipped: the reasons why steps were not compared, one sentence each.
        named: a sentence about values that changed outside the state; "" if there are none.
        failure: a sentence about the step whose results differed; "" if there is none.
        is_over: nothing is left to compare, or a step's results differed.
        has_returned: the training function has returned on rank 0.
    """

    steps: int = 0
    equal: tuple[int, ...] = ()
    restarted: tuple[int, ...] = ()
    skipped: tuple[str, ...] = ()
    named: str = ""
    failure: str = ""
    is_over: bool = False
    has_returned: bool = False


def write_report(log_dir: Path, report: RetakenReport) -> None:
    """Replace the report in this folder.

    Raises:
        StoreError: the report cannot be written.
    """
    durable.replace_note(log_dir / _FILE, msgspec.json.encode(report))


def read_report(log_dir: Path) -> RetakenReport:
    """Return the report in this folder, or an empty one if none was written yet.

    Raises:
        StoreError: the file cannot be read, or is not such a report.
    """
    path = log_dir / _FILE
    try:
        return msgspec.convert(strict_json.loads(path.read_bytes()), type=RetakenReport)
    except FileNotFoundError:
        return RetakenReport()
    except (OSError, ValueError, msgspec.ValidationError) as error:
        raise StoreError(f"{path}: expected the report of a check, found something else: {error}") from error
