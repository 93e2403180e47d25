"""torch's flight recorder data of a group is written for the analysis of hangs, on request only."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from samebits.service.log import LOGGER
from samebits.training import torch_private
from samebits.training.group.group import form_alone
from samebits.training.group.recorder import write_flight_record


def test_collectives_of_a_group_are_in_the_file(tmp_path: Path) -> None:
    group = form_alone(torch.device("cpu"))
    dist.all_reduce(torch.ones(3))
    path = write_flight_record(tmp_path, "2.1", "worker 1 is lost")
    group.drop()
    assert path == tmp_path / "flight_2.1.json" and stat.S_IMODE(path.stat().st_mode) == 0o600
    written = json.loads(path.read_text())
    assert (written["node"], written["broken"]) == ("2.1", "worker 1 is lost")
    assert "gloo:all_reduce" in {entry["profiling_name"] for entry in written["record"]["entries"]}


@pytest.mark.parametrize("record", [b"", b'{"entries": []}', b'{"version": "2.10"}', b" " * (16 << 20) + b"{}"])
def test_nothing_is_written_without_an_open_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: bytes
) -> None:
    monkeypatch.setattr(torch_private, "flight_record", lambda: record)
    assert write_flight_record(tmp_path, "0", "x") is None and not list(tmp_path.iterdir())


def test_missing_or_unwritable_folder_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_private, "flight_record", lambda: b'{"entries": [1]}')
    assert write_flight_record(tmp_path / "missing", "0", "x") is None
    (tmp_path / "flight_0.json").mkdir()
    assert write_flight_record(tmp_path, "0", "x") is None


def test_recorder_that_fails_or_writes_nonsense_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> bytes:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(LOGGER, "propagate", True)
    for answer in (fails, lambda: b"not JSON"):
        monkeypatch.setattr(torch_private, "flight_record", answer)
        assert write_flight_record(tmp_path, "0", "x") is None
    assert "device-side assert" in caplog.text and "Expecting value" in caplog.text
