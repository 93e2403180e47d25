"""Which device is here, and what a process is told so that it trains on it: a card, or the one that is made up.

Only this file knows one kind of device from another. The one idea: what only a card has is asked for by name
(``Here.has``), and where the answer is no the check says so and is not counted as passed.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.device import backend

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Here:
    """The device that is looked at.

    Attributes:
        kind: ``cuda``, ``npu``, or the made-up one's name.
        card: as its driver names it.
        driver: its version.
        environment: of a process that is to train on it.
        has: what it can do beside computing: ``graphs``, ``inductor``, ``pinning`` of host memory,
            ``sharing`` by several ranks.
    """

    kind: str
    card: str
    driver: str
    environment: dict[str, str]
    has: frozenset[str] = field(default_factory=frozenset)

    @property
    def device(self) -> torch.device:
        return torch.device(self.kind, 0)

    @property
    def torch_version(self) -> str:
        return str(torch.__version__)

    def said(self) -> str:
        """One line."""
        return f"{self.card}, driver {self.driver}, torch {self.torch_version}"


def look(folder: Path, *, made_up: bool = False, stops: bool = False) -> Here:
    """What is here; the made-up device where there is no card, or where it is asked for.

    Args:
        folder: for what processes need to find the made-up device.
        made_up: even where there is a card.
        stops: the made-up device ends its collectives as Ascend's does.
    """
    path = {"PYTHONPATH": str(ROOT)}
    if not made_up:
        if torch.cuda.is_available():
            has = frozenset({"graphs", "inductor", "pinning", "sharing"})
            told = path | {"COLLECTIVE_BACKEND": "gloo", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # deterministic
            return Here("cuda", torch.cuda.get_device_name(0), _nvidia_driver(), told, has)
        npu: Any = getattr(torch, "npu", None)
        if npu is not None and npu.is_available():
            return Here("npu", str(npu.get_device_name(0)), _ascend_driver(), path)
    os.environ["TRIAL_STOPS"] = str(int(stops))
    backend.register()
    autoload = backend.autoload_folder(folder)
    told = {"PYTHONPATH": f"{autoload}{os.pathsep}{ROOT}", "TRIAL_STOPS": str(int(stops))}
    told |= {name: os.environ[name] for name in ("TRIAL_BUILD",) if name in os.environ}
    card = "a device made up for tests" + (", stopped as Ascend's is" if stops else "")
    return Here(backend.NAME, card, "none", told, frozenset({"sharing"}))


def _nvidia_driver() -> str:
    return _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def _ascend_driver() -> str:
    return _first_line("npu-smi", "-v")


def _first_line(*command: str) -> str:
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return (said.splitlines() or ["unknown"])[0].strip()
