"""Parsing the output of nvidia-smi and npu-smi, played by test programs of those names.

No device is needed: the texts are what those tools print elsewhere, as published by users (npu-smi 24.1 of a 910B, 25.5
of an Ascend910 with two chips; nvidia-smi's CSV).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from samebits.service.health import device_health
from samebits.service.health.device_health import (
    AscendTool,
    DeviceHealth,
    NvidiaTool,
    ToolReadings,
    VendorTool,
    ascend,
    ascend_errors,
    devices,
    nvidia,
)

Tool = Callable[[str, str], None]
OF_910B = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 24.1.rc1                 Version: 24.1.rc1                                             |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B2C              | OK            | 86.8        35                0    / 0             |
| 0                         | 0000:66:00.0  | 0           0    / 0          59356/ 65536         |
+===========================+===============+====================================================+
| 3     910B2C              | Alarm         | 103.1       37                0    / 0             |
| 0                         | 0000:19:00.0  | 100         0    / 0          3351 / 65536         |
+===========================+===============+====================================================+
+---------------------------+---------------+----------------------------------------------------+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
| 0       0                 | 1712733       | python                   | 55954                   |
| No running processes found in NPU 3                                                            |
+===========================+===============+====================================================+
"""
OF_910C = """\
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip  Phy-ID              | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 4     Ascend910           | OK            | 170.7       49                0    / 0             |
| 0     8                   | 0000:8D:00.0  | 0           0    / 0          51255/ 65536         |
+------------------------------------------------------------------------------------------------+
| 4     Ascend910           | OK            | -           51                0    / 0             |
| 1     9                   | 0000:8F:00.0  | 7           0    / 0          45292/ 65536         |
+===========================+===============+====================================================+
"""
ECC = """\
        NPU ID                                   : 0
        Chip Count                               : 1

        DDR Single Bit Error Count               : 4
        DDR Double Bit Error Count               : 1
        HBM Single Bit Error Count               : 9
        HBM Double Bit Error Count               : {}
        HBM Double Bit Aggregate Total Err Cnt   : 7
        HBM Double Bit Isolated Pages Count      : 5
"""
H100 = "0, NVIDIA H100 80GB HBM3, 00000000:65:00.0, 41, 1024, 81559, 97, 0"


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tool:
    """Write a shell program of this name and make it the only one in PATH besides the system's."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def write(name: str, body: str) -> None:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o700)

    return write


def printing(text: str) -> str:
    return f"cat <<'END'\n{text}\nEND"


def test_without_a_tool_no_device_is_reported(tool: Tool) -> None:
    assert devices() == []
    assert NvidiaTool().look() is None and AscendTool().look() is None


@pytest.mark.parametrize(
    ("mask", "is_slowed"),
    [
        ("0x0000000000000000", False),
        ("0x0000000000000001", False),  # idle
        ("0x0000000000000004", False),  # the power cap: normal for such a device
        ("0x0000000000000048", True),  # the hardware, because of heat
        ("0x0000000000000024", True),  # the driver, because of heat
        ("[N/A]", None),
        ("Not Active", None),
    ],
)
def test_nvidia_smi_line(mask: str, is_slowed: bool | None) -> None:
    assert nvidia(f"{H100}, {mask}\n") == [
        ToolReadings(
            *("NVIDIA 0", "NVIDIA H100 80GB HBM3"),
            bus="00000000:65:00.0",
            celsius=41,
            used_mib=1024,
            total_mib=81559,
            busy=0.97,
            errors=0,
            is_slowed=is_slowed,
        )
    ]


def test_readable_half_of_a_line_counts() -> None:
    (told,) = nvidia("2, NVIDIA GeForce RTX 4090, [N/A], 4e9, 99999, 24564, 101, [N/A]\n")
    assert told == ToolReadings("NVIDIA 2", "NVIDIA GeForce RTX 4090", bus="[N/A]")
    text = f"a line of something else\n{H100[:30]}\nx, y, z, 1, 2, 3, 4, 5\n\x00\n"
    assert nvidia(text) == []
    assert len(nvidia(f"{H100}\n" * 1000)) == 64


def test_npu_smi_tables() -> None:
    assert ascend(OF_910B) == [
        ToolReadings("Ascend 0", "910B2C", "0", celsius=35, used_mib=59356, total_mib=65536, busy=0.0, state="OK"),
        ToolReadings("Ascend 3", "910B2C", "3", celsius=37, used_mib=3351, total_mib=65536, busy=1.0, state="Alarm"),
    ]
    assert [(one.name, one.number, one.celsius, one.used_mib, one.busy) for one in ascend(OF_910C)] == [
        ("Ascend 4", "4", 49, 51255, 0.0),
        ("Ascend 4 chip 1", "4", 51, 45292, 0.07),
    ]


def test_chips_before_the_end_of_a_truncated_table_count() -> None:
    assert [one.name for one in ascend(OF_910B[: OF_910B.index("0000:19")])] == ["Ascend 0"]
    for end in range(len(OF_910C)):
        assert len(ascend(OF_910C[:end])) + len(ascend(OF_910C[end:])) <= 2
    assert ascend("| 0 x | OK | - |\n| 0 | y | |") == [ToolReadings("Ascend 0", "x", "0", state="OK")]


def test_only_uncorrected_errors_count() -> None:
    assert ascend_errors(ECC.format(0)) == 1
    assert ascend_errors(ECC.format(3)) == 4
    assert ascend_errors("NPU ID : 0\nHBM Double Bit Error Count : many\n") is None


def test_nvidia_device_with_uncorrected_errors_is_unhealthy(tool: Tool) -> None:
    sick = H100.replace("0, NVIDIA", "1, NVIDIA").replace("97, 0", "0, 3")
    tool("nvidia-smi", printing(f"{H100}, 0x1\n{sick}, 0x1"))
    assert devices() == [
        DeviceHealth("NVIDIA 0", "NVIDIA H100 80GB HBM3, 41 °C, 1024 of 81559 MiB taken"),
        DeviceHealth(
            "NVIDIA 1",
            "NVIDIA H100 80GB HBM3, 41 °C, 1024 of 81559 MiB taken",
            "3 uncorrected memory errors since it was started",
        ),
    ]


def test_field_unknown_to_the_driver_is_omitted_from_then_on(tool: Tool, tmp_path: Path) -> None:
    tool(
        "nvidia-smi",
        f'echo "$1" >> {tmp_path}/asked\ncase "$1" in *event_reasons*) exit 2;; *) echo "{H100}, 0x40";; esac',
    )
    asked, found = NvidiaTool(), []
    for _ in range(2):
        found.append(asked.look("GPU-1"))
    assert [one[0].is_slowed for one in found if one] == [True, True]
    assert len((tmp_path / "asked").read_text().splitlines()) == 4, "the second time the driver's fields are known"


def test_ascend_device_whose_health_is_not_ok_is_unhealthy(tool: Tool) -> None:
    tool("npu-smi", f'if [ "$2" = -t ]; then {printing(ECC.format(0))}\nelse {printing(OF_910B)}\nfi')
    assert [(one.name, one.problem) for one in devices()] == [
        ("Ascend 0", "1 uncorrected memory errors since it was started"),
        ("Ascend 3", "1 uncorrected memory errors since it was started; its health is Alarm"),
    ]


@pytest.mark.parametrize(
    "body",
    ["exit 3", "echo nonsense", "head -c 3000000 /dev/zero", "exec sleep 60", "sleep 60", "yes", "echo half; sleep 60"],
)
def test_failing_tool_does_not_count_as_a_device_fault(body: str, tool: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_health, "TIMEOUT_S", 0.3)
    tool("nvidia-smi", body)
    tool("npu-smi", body)
    assert devices() == []


def test_unkillable_tool_is_left_and_run_again_once_it_has_ended(
    tool: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = tmp_path / "gate"
    tool("nvidia-smi", f"echo x >> {tmp_path}/asked\n[ -e {gate} ] || exec sleep 600\necho {H100}")
    monkeypatch.setattr(device_health, "_ENDS_IN_S", 0.1)
    kill = device_health.os.killpg
    monkeypatch.setattr(device_health.os, "killpg", lambda pid, signal: None)  # as in a driver that hangs
    asked = VendorTool("nvidia-smi", 0.5)
    assert [asked.ask() for _ in range(3)] == [None, None, None]
    assert (tmp_path / "asked").read_text() == "x\n", "run once while it hangs"
    left = asked._left
    assert left is not None
    kill(left.pid, 9)
    left.wait()
    gate.touch()
    assert asked.ask() == f"{H100}\n"
