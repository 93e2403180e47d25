"""What is made of the output of nvidia-smi and npu-smi, by programs of those names that a test has written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.service import device_health
from runtime.service.device_health import Device, devices

Tool = Callable[[str, str], None]


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tool:
    """Writes a program of this name whose body is shell, the only one of a PATH besides the system's."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def write(name: str, body: str) -> None:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o700)

    return write


def test_where_no_tool_is_there_no_device_is_told(tool: Tool) -> None:
    assert devices() == []


def test_an_nvidia_device_with_uncorrected_errors_is_sick(tool: Tool) -> None:
    tool(
        "nvidia-smi",
        'case "$1" in --query-gpu=index,name,*ecc*) ;; *) exit 9;; esac\n'
        "echo '0, NVIDIA H100 80GB HBM3, 41, 1024, 81559, 0'\n"
        "echo '1, NVIDIA H100 80GB HBM3, 83, 0, 81559, 3'\n"
        "echo '2, NVIDIA GeForce RTX 4090, 50, 5, 24564, [N/A]'\n"
        "echo 'a line of something else'",
    )
    assert devices() == [
        Device("NVIDIA 0", "NVIDIA H100 80GB HBM3, 41 °C, 1024 of 81559 MiB taken"),
        Device(
            "NVIDIA 1",
            "NVIDIA H100 80GB HBM3, 83 °C, 0 of 81559 MiB taken",
            "3 uncorrected memory errors since it was started",
        ),
        Device("NVIDIA 2", "NVIDIA GeForce RTX 4090, 50 °C, 5 of 24564 MiB taken"),
    ]


def test_an_ascend_device_whose_health_is_not_ok_is_sick(tool: Tool) -> None:
    tool(
        "npu-smi",
        'if [ "$2" = -l ]; then\n'
        "  printf '\\tTotal Count : 2\\n\\tNPU ID : 0\\n\\tChip Count : 1\\n\\tNPU ID : 3\\n\\tChip Count : 1\\n'\n"
        'elif [ "$5" = 0 ]; then printf "\\tHealth Status : OK\\n\\tError Code : NA\\n"\n'
        'else printf "\\tHealth Status : Alarm\\n\\tError Code : 80E01801\\n"; fi',
    )
    assert devices() == [
        Device("Ascend 0", "health OK"),
        Device("Ascend 3", "health Alarm", "its health is Alarm, error code 80E01801"),
    ]


@pytest.mark.parametrize("body", ["exit 3", "echo nonsense", "head -c 3000000 /dev/zero", "sleep 60"])
def test_a_tool_that_fails_is_no_fault_of_the_device(body: str, tool: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_health, "TIMEOUT_S", 0.3)
    tool("nvidia-smi", f"exec {body}" if body.startswith("sleep") else body)
    tool("npu-smi", body if not body.startswith("sleep") else "exit 1")
    assert devices() == []
