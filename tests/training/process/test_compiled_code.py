"""COMPILE_CACHE_PATH: passed to torch if it is usable, and never an obstacle."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from samebits import config
from samebits.errors import SettingsError
from samebits.service.log import LOGGER
from samebits.training.process.compiled_code import keep_compiled_code

NAMES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "ASCEND_CACHE_PATH", "ASCEND_MAX_OP_CACHE_SIZE")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)


def keep(device: Any = CPU, **environment: str) -> None:
    settings, _ = config.read({"ROLE": "worker", "WORKER_NUM": "1", **environment})
    keep_compiled_code(settings, device, prunes=True)


def test_without_the_variable_torch_decides() -> None:
    keep()
    assert not any(name in os.environ for name in NAMES)


def test_torch_gets_a_folder_for_its_version(tmp_path: Path) -> None:
    keep(COMPILE_CACHE_PATH=str(tmp_path / "cache"))
    folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert folder.parent == tmp_path / "cache" and folder.name.startswith(f"torch-{torch.__version__}-")
    assert Path(os.environ["TRITON_CACHE_DIR"]) == folder / "triton"


def test_users_setting_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "elsewhere")
    keep(COMPILE_CACHE_PATH=str(tmp_path / "cache"))
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "elsewhere"


def test_unusable_folder_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LOGGER, "propagate", True)
    (tmp_path / "cache").mkdir(mode=0o777)
    (tmp_path / "cache").chmod(0o777)
    keep(COMPILE_CACHE_PATH=str(tmp_path / "cache"))
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
    assert "compiled code is not kept" in caplog.text


@pytest.mark.parametrize(("mode", "compiles"), [("binary", False), ("cache", True)])
def test_ascends_operators_are_loaded_or_compiled_and_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, compiles: bool
) -> None:
    chosen: list[bool] = []
    npu = SimpleNamespace(set_compile_mode=lambda jit_compile: chosen.append(jit_compile))
    monkeypatch.setattr(torch, "get_device_module", lambda _: npu)
    keep(SimpleNamespace(type="npu"), OP_COMPILE=mode, COMPILE_CACHE_PATH=str(tmp_path / "cache"))
    assert chosen == [compiles]
    kept = (os.environ.get("ASCEND_CACHE_PATH"), os.environ.get("ASCEND_MAX_OP_CACHE_SIZE"))
    folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / "ascend"
    assert kept == ((str(folder), "-1") if compiles else (None, None))


def test_operators_are_not_selected_twice_nor_for_a_device_that_compiles_none(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SettingsError, match="OP_COMPILE=binary,cache: expected binary or cache"):
        keep(OP_COMPILE="binary,cache")
    monkeypatch.setattr(LOGGER, "propagate", True)
    keep(OP_COMPILE="cache")
    assert "OP_COMPILE=cache applies only to Ascend; this process trains on cpu. Fix:" in caplog.text
