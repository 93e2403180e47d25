"""CAUSE_TABLE: a user's own rows of the table of causes, from a file; what they mean is ``cause_rules``'.

Only the reading lives here: a plain file of a bounded size, which is not waited for.
"""

from __future__ import annotations

import os
import stat

from runtime.config import Settings
from runtime.core.cause_table import DEFAULT, CauseTable
from runtime.errors import SettingsError
from runtime.service.cause_rules import MAX_BYTES, read_rules


def table_of(settings: Settings) -> CauseTable:
    """The table that counts in this job.

    Raises:
        SettingsError: there is no such file, or something in it is wrong.
    """
    path = settings.cause_table
    if path is None:
        return DEFAULT
    fix = "correct the path, or unset CAUSE_TABLE"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise SettingsError([f"CAUSE_TABLE={path}: no plain file. Fix: {fix}"])
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise SettingsError([f"CAUSE_TABLE={path}: {error.strerror}. Fix: {fix}"]) from None
    if len(data) > MAX_BYTES:
        raise SettingsError([f"CAUSE_TABLE={path}: more than {MAX_BYTES} bytes. Fix: leave out what is not needed"])
    try:
        return read_rules(data.decode(), str(path))
    except UnicodeDecodeError:
        raise SettingsError([f"CAUSE_TABLE={path}: no UTF-8. Fix: save it as UTF-8"]) from None
