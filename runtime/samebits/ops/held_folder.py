"""A folder that is kept hold of, so that another one under the same name is not taken for it.

The one idea: an open descriptor keeps the folder's number from being given to the next folder.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


class HeldFolder:
    """The folder that ``path`` names now; where there is none, the first that it will name."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        self.is_there()

    def is_there(self) -> bool:
        """Whether the path still names it; True where that cannot be told."""
        try:
            if self._descriptor is None:
                with contextlib.suppress(FileNotFoundError):
                    self._descriptor = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                return True
            return os.path.samestat(self._path.stat(), os.fstat(self._descriptor))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Let go of it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
