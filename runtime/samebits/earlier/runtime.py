"""The module that ``import runtime`` finds in a job stored by an earlier release: an alias of samebits.

It replaces itself in ``sys.modules`` by the package samebits, and finds ``runtime.x`` as ``samebits.x``, so that no
module is loaded twice. New scripts use ``import samebits``.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

import samebits

_EARLIER = "runtime."


class _EarlierNames(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Find each module of the package under its earlier name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a spec for ``runtime.x``; its module is ``samebits.x``."""
        return importlib.machinery.ModuleSpec(fullname, self) if fullname.startswith(_EARLIER) else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Return the module, loaded once under its own name."""
        module = importlib.import_module(f"samebits.{spec.name.removeprefix(_EARLIER)}")
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's own spec, which the import system has just replaced."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


sys.meta_path.insert(0, _EarlierNames())
sys.modules[__name__] = samebits
print(
    "samebits: this job was started by an earlier release, so its script's `import runtime` still works. Fix: "
    "change it to `import samebits` before the next start",
    file=sys.stderr,
    flush=True,
)
