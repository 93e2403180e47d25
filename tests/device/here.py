"""Which device this machine has, and the environment of a process that trains on it: a card or the simulated one.

Only this file distinguishes kinds of devices. Features that only cards have are asked for by name (``Here.has``).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from samebits.training.group import device as devices
from tests.device import backend

ROOT = Path(__file__).resolve().parents[2]
SOURCES = f"{ROOT / 'runtime'}{os.pathsep}{ROOT}"
"""First in PYTHONPATH of every process that is started here, so that none imports an installed samebits."""
_COLLECTIVES = "COLLECTIVE_BACKEND"
_SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"
_VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}


@dataclass(frozen=True, slots=True)
class Here:
    """The device to check.

    Attributes:
        kind: ``cuda``, ``npu``, or the simulated one's name.
        card: its name according to the driver.
        driver: its version.
        environment: the environment of a process that is to train on it.
        has: further abilities: ``graphs``, ``inductor``, ``pinning`` of host memory, ``sharing`` by several ranks.
        pair: environment of two ranks that the device's own backend connects; None if that is impossible or not tried.
    """

    kind: str
    card: str
    driver: str
    environment: dict[str, str]
    has: frozenset[str] = field(default_factory=frozenset)
    pair: dict[str, str] | None = None

    @property
    def nccl(self) -> str:
        """NCCL's version; empty on other devices."""
        return ".".join(map(str, torch.cuda.nccl.version())) if self.kind == "cuda" else ""

    @property
    def device(self) -> torch.device:
        return torch.device(self.kind, 0)

    @property
    def torch_version(self) -> str:
        return str(torch.__version__)

    def said(self) -> str:
        """Describe it in one line."""
        return f"{self.card}, driver {self.driver}, torch {self.torch_version}"


def look(folder: Path, *, simulated: bool = False, stops: bool = False, refuses_two_ranks: bool = False) -> Here:
    """Return this machine's device, or the simulated one if there is no card or it is requested.

    Args:
        folder: for files that let processes find the simulated device.
        simulated: use it even if there is a card.
        stops: the simulated device ends its collectives as Ascend's does.
        refuses_two_ranks: the simulated device's collectives refuse two ranks on one device, as NCCL does.
    """
    path = {"PYTHONPATH": SOURCES}
    if not simulated:
        if torch.cuda.is_available():
            has = frozenset({"graphs", "inductor", "pinning", "sharing"})
            told = path | (_first_of("cuda", 1) or {}) | {_COLLECTIVES: "gloo"}
            told["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # deterministic
            told["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # a pool of processes per rank costs more than it saves here
            return Here("cuda", torch.cuda.get_device_name(0), _nvidia_driver(), told, has)
        npu: Any = getattr(torch, "npu", None)
        if npu is not None and npu.is_available():
            told = path | (_first_of("npu", 1) or {})
            return Here("npu", str(npu.get_device_name(0)), _ascend_driver(), told)
    os.environ["TRIAL_STOPS"] = str(int(stops))
    backend.register()
    autoload = backend.autoload_folder(folder)
    told = {"PYTHONPATH": f"{autoload}{os.pathsep}{SOURCES}", "TRIAL_STOPS": str(int(stops))}
    told |= {name: os.environ[name] for name in ("TRIAL_BUILD",) if name in os.environ}
    told |= {"TRIAL_SHARED": "0"} if refuses_two_ranks else {}
    card = "a simulated device for tests" + (", stopped as Ascend's is" if stops else "")
    return Here(backend.NAME, card, "none", told, frozenset({"sharing"}))


def connected(here: Here, folder: Path, within_s: float) -> tuple[Here, str]:
    """Try two ranks of the device's own backend; return how this device's jobs are connected, and why.

    NCCL before 2.30 refuses two ranks on one device ("Duplicate GPU detected"), later versions do unless
    NCCL_MULTI_RANK_GPU_ENABLE=1. If they are refused, the tensors of jobs travel through the host, over gloo, and a
    second device, if there is one, is used only to try what takes two ranks of the device's own backend.

    Args:
        here: the device.
        folder: for files of the ranks.
        within_s: for each of the two attempts, on one device and on two.
    """
    told = {_SHARING: os.environ.get(_SHARING, "1")}
    told |= {name: value for name, value in here.environment.items() if name != _COLLECTIVES}
    own = devices.backend_of(here.device)
    why = _pair_fails(told, folder / "sharing", within_s)
    if why is None:
        return replace(here, environment=told, pair=told), f"{own}, two ranks on one device"
    two = _first_of(here.kind, 2)
    apart = None if two is None or _pair_fails(told | two, folder / "apart", within_s) is not None else told | two
    if here.kind not in dist.Backend.backend_capability[dist.Backend.GLOO]:
        return replace(here, has=here.has - {"sharing"}, pair=apart), f"one rank a device: {why}"
    gloo = told | {_COLLECTIVES: "gloo"}
    return replace(here, environment=gloo, pair=apart), f"gloo, through the host; {own} refused: {why}"


def _pair_fails(told: dict[str, str], folder: Path, within_s: float) -> str | None:
    """Start two ranks; return why they could not add up, or None if they could."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = {name: value for name, value in (os.environ | told).items() if name != _COLLECTIVES}
    script, file = Path(__file__).with_name("pair.py"), folder / "pair-store"
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(file)],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said: list[str] = []
    try:
        for one in ranks:
            said += one.communicate(timeout=within_s)[1].splitlines()
    except subprocess.TimeoutExpired:
        said.append(f"Error: not done within {within_s:g} s")
    finally:
        for one in ranks:
            one.kill()
            one.wait()
    return None if all(one.returncode == 0 for one in ranks) else reason(said)


def reason(said: list[str]) -> str:
    """Return the line that says why a rank failed; torch prints warnings behind its traceback."""
    lines = [line.strip() for line in said if line.strip()]
    for pattern in (r"Duplicate GPU|Multiple Ranks", r"Error\b"):
        if found := [line for line in lines if re.search(pattern, line)]:
            return found[-1][:200]
    return (lines or ["no reason given"])[-1][:200]


def _first_of(kind: str, count: int) -> dict[str, str] | None:
    """Return the variable with which a process sees only this many devices; None if there are fewer.

    On a machine with several cards, all ranks share the first one.
    """
    if kind not in _VISIBLE:
        return {"TRIAL_DEVICES": str(count)}
    there = range(torch.accelerator.device_count())
    names = os.environ.get(_VISIBLE[kind], ",".join(map(str, there))).split(",")
    return None if len(names) < count else {_VISIBLE[kind]: ",".join(names[:count])}


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
