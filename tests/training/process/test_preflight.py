"""Pre-flight checks: faulty devices, memory and disks are named; a healthy host is admitted."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from samebits import config
from samebits.config import Settings
from samebits.errors import PreflightError, StoreError
from samebits.service.health.device_health import DeviceHealth
from samebits.training.process import preflight

CPU = torch.device("cpu")


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setattr(preflight.device_health, "devices", lambda: [DeviceHealth("NVIDIA 0", "H100, 41 °C")])
    found, _ = config.read({"WORKER_NUM": "2", "NODE_ID": "7"}, role_required=False)
    return replace(found, checkpoint_path=tmp_path / "ckpt")


def test_healthy_host_passes_and_leaves_nothing_behind(
    settings: Settings, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with caplog.at_level(logging.INFO):
        preflight.require(settings, CPU)
    assert "4 of 4 products correct" in caplog.text and "MB/s are durable in" in caplog.text
    assert "cpu memory: 64 MiB hold what is written" in caplog.text and "NVIDIA 0: H100, 41 °C" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_wrong_bit_in_one_product_is_found(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    multiply, calls = torch.Tensor.__matmul__, []

    def errs(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = multiply(left, right)
        if product.dtype is torch.float32:
            calls.append(product)
            if len(calls) == 3:
                product.view(torch.int32)[5, 7] ^= 1 << 18
        return product

    monkeypatch.setattr(torch.Tensor, "__matmul__", errs)
    with pytest.raises(
        PreflightError, match=r"the pre-flight check of 7 failed: .*cpu computes: 1 of 4 products were wrong"
    ):
        preflight.require(settings, CPU)


def test_faulty_memory_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    xor = torch.bitwise_xor

    def forgets(*args: Any, out: torch.Tensor) -> torch.Tensor:
        xor(*args, out=out)
        out[1000:1003] = 0
        return out

    monkeypatch.setattr(torch, "bitwise_xor", forgets)
    assert preflight.memory(CPU).problem == "6 words differ from what was written"


def test_faulty_device_and_unwritable_disk_are_named(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        preflight.device_health, "devices", lambda: [DeviceHealth("Ascend 3", "Alarm", "its health is Alarm")]
    )
    blocked = settings.checkpoint_path
    blocked.write_text("a file")
    with pytest.raises(
        PreflightError, match=r"Ascend 3: its health is Alarm; disk: .*\. Fix: start it on another host"
    ):
        preflight.require(settings, CPU)


def test_disk_that_returns_other_data_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = preflight.os.read
    monkeypatch.setattr(preflight.os, "read", lambda descriptor, size: bytes([1, *read(descriptor, size)[1:]]))
    with pytest.raises(StoreError, match=r"the data read differs from the data written\. Fix: "):
        preflight.write_and_read(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_checks_draw_no_random_numbers(settings: Settings) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    preflight.require(settings, CPU)
    assert torch.equal(torch.rand(3), expected)
