"""Start the dashboard page for a job if DASHBOARD names a port.

The job does not depend on the page: if the page cannot start, a message is printed and the job continues.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from samebits import config
from samebits.config import Settings
from samebits.errors import StoreError
from samebits.net.address import loopback
from samebits.store import private

LOG = "dashboard.log"
LINGER_S = 600
NEEDED = ("starlette", "uvicorn")


def start_beside(settings: Settings, folder: Path) -> str:
    """Start the page of this folder's job if DASHBOARD requests it.

    Returns:
        A sentence about the page, or an empty string.
    """
    port = settings.dashboard.port
    if port is None:
        return ""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        needs = " and ".join(missing)
        return f"DASHBOARD={port}: no page, for it needs {needs}. Fix: pip install 'samebits[dashboard]'"
    try:
        log = private.open_to_append(settings.log_dir / LOG)
    except StoreError as error:
        return f"DASHBOARD={port}: no page: {error}"
    try:
        subprocess.Popen(
            [sys.executable, "-P", "-m", "samebits", "dashboard", "--port", str(port), "--linger", str(LINGER_S)],
            cwd=folder,
            env=config.whole_environment(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    except OSError as error:
        return f"DASHBOARD={port}: no page: {error}"
    finally:
        os.close(log)
    host = loopback()
    return (
        f"the dashboard is at http://{f'[{host}]' if ':' in host else host}:{port}/; {settings.log_dir / LOG} says more"
    )
