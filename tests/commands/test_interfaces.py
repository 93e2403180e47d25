"""Network interfaces: ``doctor`` reports if a job's data use the slower of two networks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil  # type: ignore[import-untyped]
import pytest

from samebits import config
from samebits.commands import doctor
from samebits.commands.doctor import Interface, interfaces, slower
from samebits.config import Settings

SLOW = Interface("eth0", frozenset({"10.0.0.1", "fe80::1"}), 1_000)
FAST = Interface("ib0", frozenset({"10.9.0.1", "fd00::1"}), 100_000)
UNKNOWN = Interface("veth0", frozenset({"172.16.0.1"}), None)


@pytest.mark.parametrize(
    ("used", "known", "found"),
    [
        ("10.0.0.1", [SLOW, FAST, UNKNOWN], (SLOW, FAST)),
        ("fe80::1", [SLOW, FAST], (SLOW, FAST)),
        ("10.9.0.1", [SLOW, FAST], None),
        ("172.16.0.1", [SLOW, FAST, UNKNOWN], None),  # its speed is unknown
        ("192.0.2.9", [SLOW, FAST], None),  # belongs to no host
        ("10.0.0.1", [SLOW, Interface("eth1", frozenset({"10.1.0.1"}), 1_500)], None),  # hardly faster
        ("10.0.0.1", [SLOW], None),
    ],
)
def test_faster_interface_is_found_if_the_kernel_knows_it(
    used: str, known: list[Interface], found: tuple[Interface, Interface] | None
) -> None:
    assert slower(used, known) == found


def test_this_hosts_interfaces_have_its_addresses_without_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    found = interfaces()
    assert all(one.addresses for one in found)
    assert not any({"127.0.0.1", "::1"} & one.addresses or "%" in "".join(one.addresses) for one in found)
    for speed, mbit in ((25_000, 25_000), (0, None)):
        states = {one.name: SimpleNamespace(speed=speed) for one in found}
        monkeypatch.setattr(psutil, "net_if_stats", lambda states=states: states)
        assert {one.mbit for one in interfaces()} <= {mbit}


def settings_with(host: str) -> Settings:
    return config.read({"SCHED_HOST": host, "CLUSTER_INSECURE": "1"}, role_required=False)[0]


def test_doctor_reports_that_the_slow_network_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "address_towards", lambda host, port: "10.0.0.1")
    monkeypatch.setattr(doctor, "interfaces", lambda: [SLOW, FAST])
    [finding] = doctor.network(settings_with("10.0.0.2"))
    assert finding.found == "gradients go over eth0 (10.0.0.1) at 1000 Mbit/s, but ib0 (10.9.0.1) offers 100000"
    assert "in the network of ib0" in finding.fix
    monkeypatch.setattr(doctor, "address_towards", lambda host, port: "10.9.0.1")
    [finding] = doctor.network(settings_with("10.0.0.2"))
    assert (finding.found, finding.fix) == ("gradients go over ib0 (10.9.0.1), which leads to SCHED_HOST", "")


def test_doctor_reports_nothing_on_a_single_machine() -> None:
    assert doctor.network(settings_with("127.0.0.1")) == []


def test_doctor_checks_each_of_several_hosts(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    [finding] = doctor.scheduler(settings_with(f"file:{hosts}"))
    assert "No such file" in finding.found and finding.fix
    hosts.write_text("127.0.0.1:1\nno-such-host.invalid\n198.51.100.1\n")
    first, second, third, own = doctor.scheduler(settings_with(f"file:{hosts}"))
    assert (first.what, first.fix) == ("SCHED_HOST 127.0.0.1:1", "")
    assert first.found == "this host (127.0.0.1); no scheduler answers there now"
    assert second.found.startswith("it has no address") and "that this host can look up" in second.fix
    assert third.found == "another host (198.51.100.1); no scheduler answers there now"
    assert own.found == "a scheduler of this host listens on 127.0.0.1, port 1"
