"""CAUSE_TABLE: read a user's own rows of the table of causes; ``cause_rules`` says what they mean."""

from __future__ import annotations

from samebits.config import Settings
from samebits.core.cause_table import DEFAULT, CauseTable
from samebits.errors import SettingsError
from samebits.named_file import read_named_file
from samebits.service.cause_rules import MAX_BYTES, read_rules


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
        data = read_named_file(path, MAX_BYTES)
    except OSError as error:
        raise SettingsError([f"CAUSE_TABLE={path}: {error.strerror}. Fix: {fix}"]) from None
    if len(data) > MAX_BYTES:
        raise SettingsError([f"CAUSE_TABLE={path}: more than {MAX_BYTES} bytes. Fix: leave out what is not needed"])
    try:
        return read_rules(data.decode(), str(path))
    except UnicodeDecodeError:
        raise SettingsError([f"CAUSE_TABLE={path}: no UTF-8. Fix: save it as UTF-8"]) from None
