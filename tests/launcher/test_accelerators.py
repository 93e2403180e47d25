"""Counting accelerators, on a machine that appears to have four."""

from __future__ import annotations

from pathlib import Path

import pytest

from samebits.launcher.spawning import device_files, usable_devices


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        ("0", 1),
        ("2,0", 2),
        ("0, 1", 2),
        ("0,1,", 2),
        ("", 0),
        ("-1", 0),
        ("0,1,-1,2", 2),
        ("NoDevFiles", 0),
        ("0,NoDevFiles", 1),
        ("0,,1", 1),
        (",0", 0),
        ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6,GPU-7", 2),
        ("MIG-GPU-8932f937-d72c-4106-c12f-20bd9faed9f6/1/2", 1),
    ],
)
def test_hidden_devices_are_not_counted(visible: str, count: int) -> None:
    assert usable_devices({"CUDA_VISIBLE_DEVICES": visible}, 4) == count
    assert usable_devices({"ASCEND_RT_VISIBLE_DEVICES": visible}, 4) == count


def test_all_devices_count_if_none_is_hidden() -> None:
    assert [usable_devices({}, count) for count in (4, 0)] == [4, 0]
    assert usable_devices({"CUDA_VISIBLE_DEVICES": "0,1"}, 0) == 0
    assert [usable_devices({name: "cpu"}, 4) for name in ("DEVICE", "MS_DEVICE")] == [0, 0]
    assert usable_devices({"DEVICE": "cuda"}, 4) == 4


@pytest.mark.parametrize("kind", ["nvidia", "davinci"])
def test_device_is_a_numbered_file(kind: str, tmp_path: Path) -> None:
    for name in ("0", "1", "10", "ctl", "-uvm", "0x"):
        (tmp_path / f"{kind}{name}").touch()
    assert device_files(tmp_path) == 3
    assert device_files(tmp_path / "nothing") == 0
