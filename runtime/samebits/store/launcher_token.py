"""The token of a job's launcher: what only this user's processes in one log folder can know (rule 1b).

Making and reading it live here; what is proved with it is ``core.replacements``'. The one idea: whoever can read a file
of this user's own that others may not read could start any process of the job anyway.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from samebits.core.replacements import TOKEN_BYTES
from samebits.errors import StoreError
from samebits.store import durable, private

TOKEN_FILE = "launcher.token"


def make(log_dir: Path) -> None:
    """A new token, of this user alone (0600), in place of any older one: before the job's scheduler begins.

    Raises:
        StoreError: it cannot be written there.
    """
    private.make_folder(log_dir)
    durable.write_file_atomically(log_dir / TOKEN_FILE, secrets.token_hex(TOKEN_BYTES).encode())


def read(log_dir: Path) -> bytes:
    """The token; empty where no launcher has left one.

    Raises:
        StoreError: the file is none of this user's own, or holds something else.
    """
    path = log_dir / TOKEN_FILE
    private.check_folder(log_dir)
    text = private.read(path, 2 * TOKEN_BYTES + 1)
    if text is None:
        return b""
    try:
        token = bytes.fromhex(text.decode("ascii"))
    except ValueError:
        token = b""
    if len(token) != TOKEN_BYTES:
        raise StoreError(f"{path}: not a launcher's token. Fix: remove it; replacements then wait for their seats")
    return token
