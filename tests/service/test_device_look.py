"""An unhealthy device is detected within three checks, whatever its tool does meanwhile."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from samebits.core.reports import Ailment, HealthReport, Sign
from samebits.core.watch.health_limits import HealthReading, HealthWatch, said
from samebits.errors import PreflightError
from samebits.service.health import host_sensor
from samebits.service.health.device_look import (
    DeviceMemory,
    DeviceReadings,
    KernelLog,
    WatchedDevice,
    bus_of,
    limits_of,
)
from samebits.service.health.host_sensor import HealthLook
from tests.service.house import PATIENCE_S
from tests.service.test_device_health import ECC, H100, OF_910B, Tool, printing, tool
from tests.service.test_health import settings_with

__all__ = ["tool"]
GIB = 1 << 30


class Card:
    """A device whose memory the test sets."""

    def __init__(self, uuid: str = "GPU-7", place: int | None = None) -> None:
        self.memory: DeviceMemory | None = None
        self.watched = WatchedDevice("cuda:0", uuid, place, lambda: self.memory)


def shares(readings: list[HealthReading]) -> dict[Sign, float]:
    return {one.sign: round(one.share, 3) for one in readings}


def test_values_of_the_tool_and_of_the_training_thread_are_combined(tool: Tool) -> None:
    card = Card()
    tool("nvidia-smi", f'[ "$2" = --id=GPU-7 ] || exit 9\necho "{H100}, 0x40"')
    readings = DeviceReadings(card.watched)
    assert shares(readings.look()) == {Sign.DEVICE_HEAT: 0.41, Sign.DEVICE_ERRORS: 0.0, Sign.DEVICE_SLOWED: 1.0}
    card.memory = DeviceMemory(total=80 * GIB, free=20 * GIB, held=58 * GIB, used=10 * GIB)
    found = shares(readings.look())
    assert found[Sign.DEVICE_MEMORY] == 0.15, "memory cached by torch is available"
    assert found[Sign.DEVICE_SHARED] == 0.0, "the other two GiB are the driver's context"
    card.memory = DeviceMemory(total=80 * GIB, free=10 * GIB, held=30 * GIB, used=30 * GIB)
    assert shares(readings.look())[Sign.DEVICE_SHARED] == 0.97


def test_ascend_device_is_found_by_its_position(tool: Tool) -> None:
    tool(
        "npu-smi",
        f'if [ "$2" = -t ]; then [ "$5" = 3 ] || exit 9; {printing(ECC.format(2))}\nelse {printing(OF_910B)}\nfi',
    )
    found = DeviceReadings(Card("", 1).watched).look()
    assert shares(found) == {Sign.DEVICE_HEAT: 0.37, Sign.DEVICE_ERRORS: 3.0, Sign.DEVICE_FAULT: 1.0}
    assert {one.where for one in found} == {"Ascend 3", "Ascend 3: its health is Alarm"}


@pytest.mark.parametrize("then", ["exit 1", "sleep 60", "echo nonsense", f"echo '{H100[:40]}'"])
def test_silent_tool_does_not_make_a_device_healthy(then: str, tool: Tool, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    tool("nvidia-smi", f'[ -e {gate} ] && {{ {then}; exit 0; }}\necho "{H100[:-1]}5, 0x1"')
    readings = DeviceReadings(Card().watched, timeout_s=0.5)
    before = readings.look()
    assert shares(before)[Sign.DEVICE_ERRORS] == 5.0
    gate.touch()
    assert readings.look() == before


def test_device_of_another_vendor_has_only_its_memory() -> None:
    card = Card("", None)
    readings = DeviceReadings(card.watched)
    assert readings.look() == []
    card.memory = DeviceMemory(100, 4, 90, 90)
    assert readings.look() == [HealthReading(Sign.DEVICE_MEMORY, "cuda:0", 0.96)]


def test_xid_of_this_device_is_a_fault_and_a_programs_is_not(tool: Tool, tmp_path: Path) -> None:
    tool("nvidia-smi", f'echo "{H100}, 0x1"')
    log = tmp_path / "kmsg"
    log.write_text("3,1,1,-;NVRM: Xid (PCI:0000:65:00): 79, pid=1, before this process began\n")
    readings = DeviceReadings(Card().watched, KernelLog(log))

    def append(text: str) -> list[str]:
        with log.open("a") as file:
            file.write(text)
        return [one.where for one in readings.look() if one.sign is Sign.DEVICE_FAULT]

    assert append("3,2,2,-;NVRM: Xid (PCI:0000:65:00): 31, pid=9, name=python, MMU Fault\n") == []
    assert append("3,3,3,-;NVRM: Xid (PCI:0000:66:00): 79, pid=9, GPU has fallen off the bus.\n") == []
    assert append("3,4,4,-;Xid 79 Xid (PCI:zz:65:00): 79\n\x00\xff" * 99) == []
    fault = ["NVIDIA 0: Xid 79 (it has fallen off the bus)"]
    assert append("3,5,5,-;NVRM: Xid (PCI:0000:65:00): 79, pid=9, GPU has fallen off the bus.\n") == fault
    assert append("") == fault, "it stays"
    readings.close()


def test_recovery_action_is_a_fault_until_the_driver_withdraws_it(
    tool: Tool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "samebits")
    old, action = tmp_path / "old", tmp_path / "action"
    refuses = f'case "$1" in *gpu_recovery_action*) [ -e {old} ] && exit 2;; esac'
    tool("nvidia-smi", f'{refuses}\n[ -e {old} ] && echo "{H100}, 0x1" || echo "{H100}, 0x1, $(cat {action})"')

    def faults(readings: DeviceReadings) -> list[str]:
        return [one.where for one in readings.look() if one.sign is Sign.DEVICE_FAULT]

    readings = DeviceReadings(Card().watched, KernelLog(tmp_path / "none"))
    assert caplog.text.count("cannot be read here") == 1
    for asked, found in (("None", []), ("Reset", ["NVIDIA 0: its driver asks for: Reset"]), ("[N/A]", [])):
        action.write_text(asked)
        assert faults(readings) == found
    old.touch()
    older = DeviceReadings(Card().watched, KernelLog(old))
    assert faults(older) == [] and shares(older.look())[Sign.DEVICE_SLOWED] == 0.0
    assert caplog.text.count("cannot be read here") == 1, "a log that can be read is not named"


def test_unreadable_kernel_log_is_empty(tmp_path: Path) -> None:
    assert KernelLog(tmp_path / "none").faults() == []
    assert bus_of("00000000:65:00.0") == (0, 0x65, 0) and bus_of("[N/A]") is None


def test_unhealthy_device_is_reported_at_the_second_check(tool: Tool, tmp_path: Path) -> None:
    limits = limits_of(settings_with(tmp_path, HEALTH="device_errors=drain,device_heat=off"))
    sick = H100.replace(", 41,", ", 99,")[:-1] + "2"
    tool("nvidia-smi", f'echo "{sick}, 0x40"')
    watch, readings = HealthWatch(limits), DeviceReadings(Card().watched)
    looks = [watch.look(readings.look()) for _ in range(3)]
    assert looks == [False, True, False]
    assert [(one.drains, said(one)) for one in watch.ailments] == [
        (True, "NVIDIA 0 has uncorrected memory errors, 2 since it was started (HEALTH=device_errors)"),
        (False, "NVIDIA 0 is slowed down, for heat or power (HEALTH=device_slowed)"),
    ]


@pytest.mark.parametrize(
    ("ailment", "text"),
    [
        (
            Ailment(Sign.DEVICE_HEAT, "NVIDIA 0", 0.93, 0.9, False),
            "NVIDIA 0 is 93 °C hot (limit 90 °C, HEALTH=device_heat)",
        ),
        (
            Ailment(Sign.DEVICE_MEMORY, "cuda:0", 0.95, 0.9, False),
            "95 % of the memory of cuda:0 is taken (limit 90 %, HEALTH=device_memory)",
        ),
        (
            Ailment(Sign.DEVICE_FAULT, "NVIDIA 0: Xid 79 (it has fallen off the bus)", 1, 1, True),
            "the driver reports of NVIDIA 0: Xid 79 (it has fallen off the bus) (HEALTH=device_errors)",
        ),
        (
            Ailment(Sign.DEVICE_SHARED, "NVIDIA 0", 0.97, 0.9, False),
            "others use NVIDIA 0 as well, and it is 97 % busy (limit 90 %)",
        ),
    ],
)
def test_device_problem_is_described_in_words(ailment: Ailment, text: str) -> None:
    assert said(ailment) == text


def test_hanging_tool_delays_neither_host_checks_nor_their_report(tool: Tool, tmp_path: Path) -> None:
    tool("nvidia-smi", f"touch {tmp_path}/asked\nexec sleep 5")
    settings = settings_with(tmp_path, HEALTH="every=0.1,disk=tell:0.000001,cpu=off")
    told: list[tuple[Ailment, ...]] = []
    heard = threading.Event()

    def take(report: HealthReport) -> None:
        told.append(report.ailments)
        if (tmp_path / "asked").exists() and len(told) > 3:
            heard.set()

    look = HealthLook(settings, take)
    look.start()
    look.watch_device(Card().watched)
    assert heard.wait(PATIENCE_S)
    look.stop()


def test_device_is_reported_with_the_host(tool: Tool, tmp_path: Path) -> None:
    tool("nvidia-smi", f'echo "{H100[:-1]}2, 0x1"')
    settings = settings_with(tmp_path, HEALTH="every=0.1,disk=tell:0.000001,cpu=off")
    both = threading.Event()

    def take(report: HealthReport) -> None:
        if {Sign.DISK, Sign.DEVICE_ERRORS} <= {one.sign for one in report.ailments}:
            both.set()

    look = HealthLook(settings, take)
    look.start()
    look.watch_device(Card().watched)
    assert both.wait(PATIENCE_S)
    look.stop()


def test_disabled_check_is_not_made(tool: Tool, tmp_path: Path) -> None:
    off = {"HEALTH": ",".join(f"device_{one}=off" for one in ("errors", "heat", "slowed", "memory", "shared"))}
    assert limits_of(settings_with(tmp_path, **off)) == {}
    look = HealthLook(settings_with(tmp_path, **off), lambda report: None)
    look.watch_device(Card().watched)
    assert look._device is None


def test_worker_on_a_refused_device_asks_for_no_seat(tool: Tool, tmp_path: Path) -> None:
    tool("nvidia-smi", f'echo "{H100[:-1]}2, 0x1"')
    tells = settings_with(tmp_path)
    assert not host_sensor.may_refuse(tells)
    settings = settings_with(tmp_path, HEALTH="device_errors=refuse")
    assert host_sensor.may_refuse(settings)
    with pytest.raises(
        PreflightError, match=r"the host of 0 is not healthy, .*: NVIDIA 0 has uncorrected .*\. Fix: start"
    ):
        host_sensor.require(settings, Card().watched)
    host_sensor.require(settings, None)
    full = settings_with(tmp_path, HEALTH="disk=refuse:0.000001")
    with pytest.raises(PreflightError, match="HEALTH=disk"):
        host_sensor.require(full, None)
