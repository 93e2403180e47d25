"""Host sensors on this machine, and a real agent whose disk is over its limit."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import psutil
import pytest

from samebits import config
from samebits.core.reports import Ailment, Figure, HealthReport, Sign
from samebits.core.watch.health_limits import HealthWatch
from samebits.service.health.host_sensor import SHARED_MEMORY, HealthLook, Usage, limits_of, places_of, readings
from samebits.store.checkpoint.memory_buffer import taken_share
from tests.service.house import PATIENCE_S, House


def settings_with(tmp_path: Path, **environ: str) -> config.Settings:
    named = {
        "CHECKPOINT_PATH": str(tmp_path / "not" / "there"),
        "RECOVERY_PATH": str(tmp_path),
        "LOG_DIR": str(tmp_path),
    }
    settings, _ = config.read({"ROLE": "worker", "WORKER_NUM": "1", "NODE_ID": "0", **named, **environ})
    return settings


def test_every_sensor_is_read_on_this_machine(tmp_path: Path) -> None:
    places = places_of(settings_with(tmp_path))
    assert len(places) == len({place.stat().st_dev for place in places}), "one of each file system"
    assert {tmp_path.stat().st_dev, SHARED_MEMORY.stat().st_dev} == {place.stat().st_dev for place in places}
    found = list(readings(places))
    assert {one.sign for one in found} == {Sign.CPU, Sign.MEMORY, Sign.DISK, Sign.DESCRIPTORS}
    assert all(0 <= one.share <= 1 for one in found), found
    disk = next(one for one in found if one.where == str(places[0]))
    assert disk.share == pytest.approx(psutil.disk_usage(str(places[0])).percent / 100, abs=0.05)


def test_url_is_not_checked_as_a_disk_and_a_disabled_check_has_no_limit(tmp_path: Path) -> None:
    settings = settings_with(tmp_path, CHECKPOINT_PATH="s3://bucket/job", HEALTH="cpu=off,disk=drain")
    assert all(isinstance(place, Path) for place in places_of(settings))
    limits = limits_of(settings)
    assert Sign.CPU not in limits
    assert (limits[Sign.DISK].drains, limits[Sign.MEMORY].drains) == (True, False)


def test_tightest_memory_limit_counts(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 800 kB\n")
    assert taken_share(proc, groups) == pytest.approx(0.2)
    (proc / "self" / "cgroup").write_text("0::/box/inner\n")
    (groups / "box" / "inner").mkdir(parents=True)
    (groups / "box" / "memory.max").write_text("1000")
    (groups / "box" / "memory.current").write_text("950")
    (groups / "box" / "memory.stat").write_text("anon 900\ninactive_file 30\nactive_file 20\n")
    assert taken_share(proc, groups) == pytest.approx(0.9), "reclaimable file cache does not count"


def test_problem_is_reported_after_two_checks_and_while_it_lasts(tmp_path: Path) -> None:
    settings = settings_with(tmp_path, HEALTH="every=0.1,disk=tell:0.000001,cpu=off")
    told: list[tuple[Ailment, ...]] = []
    twice = threading.Event()

    def take(report: HealthReport) -> None:
        told.append(report.ailments)
        if len(told) == 2:
            twice.set()

    look = HealthLook(settings, take)
    look.start()
    assert twice.wait(PATIENCE_S)
    look.stop()
    assert any(one.sign is Sign.DISK and one.limit == 0.000001 for one in told[0])


@pytest.mark.parametrize("mib_to_spare", [-1000, 1000])
def test_log_disk_is_a_problem_once_less_than_the_limit_is_free(tmp_path: Path, mib_to_spare: int) -> None:
    limit = psutil.disk_usage(str(tmp_path)).free // 2**20 - mib_to_spare
    settings = settings_with(tmp_path, LOG_DIR=str(tmp_path / "device"), HEALTH=f"off,logs=tell:{limit}")
    watch = HealthWatch(limits_of(settings))
    for _ in range(2):
        watch.look(readings([], None, settings.log_dir))
    assert [(one.sign, one.where) for one in watch.ailments] == (
        [(Sign.LOGS, str(tmp_path / "device"))] if mib_to_spare < 0 else []
    )
    assert Sign.LOGS in limits_of(settings_with(tmp_path)), "on by default"


def test_scheduler_receives_the_report(tmp_path: Path) -> None:
    house = House(tmp_path, 1, HEALTH="every=0.1,disk=tell:0.000001")
    events = tmp_path / "recovery" / "events.jsonl"
    house.scheduler()
    house.seated("0")
    patience = threading.Event()
    for _ in range(int(PATIENCE_S * 20)):
        if events.exists() and "HEALTH=disk" in events.read_text():
            break
        patience.wait(0.05)
    found = [line for line in events.read_text().splitlines() if "HEALTH=disk" in line]
    house.close()
    assert found and '"kind":"note"' in found[0], "logged, and in the history"


def test_workers_resource_use_is_reported_if_the_world_may_resize(tmp_path: Path) -> None:
    elastic = settings_with(tmp_path, HEALTH="every=0.1", WORKER_NUM="2", MAX_WORKER_NUM="4")
    found: list[tuple[Figure, ...]] = []
    heard = threading.Event()

    def take(usage: tuple[Figure, ...]) -> None:
        found.append(usage)
        heard.set()

    look = HealthLook(elastic, lambda report: None, take)
    look.start()
    assert heard.wait(PATIENCE_S)
    look.stop()
    used = {one.name: one.value for one in found[0]}
    assert set(used) == {"cpu", "memory"}
    assert used["cpu"] >= 0 and 0 < used["memory"] <= 1


def test_busy_core_counts_as_one() -> None:
    usage = Usage()
    began_s = time.process_time()
    while time.process_time() < began_s + 0.05:
        pass
    used = {one.name: one.value for one in usage.look()}
    assert used["cpu"] > 0
