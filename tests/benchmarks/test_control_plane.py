"""Figures of the control plane benchmark; its clients with a real scheduler and bare sockets, without timing."""

from __future__ import annotations

import json
import os
import resource

import pytest

from benchmarks import control_plane, control_plane_tree, control_plane_trials
from benchmarks.control_plane import (
    GRPC,
    TCPSTORE,
    Found,
    figures,
    measure_etcd,
    measure_takeovers,
    people,
    ratios,
    report,
    report_etcd,
    report_takeovers,
)
from benchmarks.control_plane_stage import cpu_s, descriptor_problem, resident_kib
from benchmarks.control_plane_trials import Kept, Losses, MassLoss, Served
from benchmarks.report import MISSING, problems
from benchmarks.workers import control_plane_bare
from samebits.core import messages
from tests.store.etcd.etcd_cluster import ETCD


def served(form_s: float, form_cpu_s: float, beats_cpu_s: float, back_s: float) -> Served:
    return Served(form_s, form_cpu_s / 2, form_cpu_s, 4000, 500, 5.0, beats_cpu_s, told_s=0.025, back_s=back_s)


def found() -> Found:
    return Found(
        ours=[served(form_s, 0.02, 0.010, 3.0) for form_s in (2.0, 2.6, 9.0)],
        curve=[served(5.2, 0.06, 0.011, 3.0)],
        bare=[served(2.0, 0.01, 0.005, 2.0)],
        bare_curve=[served(5.0, 0.01, 0.006, 2.0)],
        kept=[Kept(0.04, 100, 100), Kept(0.05, 100, 97)],
        mass=[MassLoss(50, 0.2, 1), MassLoss(50, 0.3, 2)],
        losses=[Losses([0.001 * number for number in range(1, 101)], [0.002] * 98 + [0.009], 0.03)],
        echo_s=[1.3],
        publish_s=[0.02],
        peers_s={TCPSTORE: [1.3]},
    )


def test_our_figures() -> None:
    ours = figures(found(), 100)
    assert ours["form_s"] == 2.6
    assert (ours["cpu_us_per_registration"], ours["admitted_cpu_us"]) == (200, 100)
    assert ours["kib_per_worker"] == 40
    assert (ours["heartbeat_cpu_us"], ours["heartbeats_per_s"], ours["heartbeat_cpu_s_per_s"]) == (20, 100, 0.002)
    assert ours["heartbeat_vs_bare"] == 2
    assert (ours["decision_p99_ms"], ours["decisions_count"]) == (100, 100)
    assert (ours["mass_loss_seen_s"], ours["mass_loss_rounds_count"]) == (0.25, 2)
    assert (ours["journal_load_ms"], ours["registrations_lost_count"]) == (45, 3)


def test_promised_ratios() -> None:
    against = ratios(found())
    assert against["form_vs_router"] == pytest.approx(1.3)
    assert against["form_vs_router_echo"] == against["form_vs_tcpstore"] == pytest.approx(2)
    assert against["fanout_vs_pub"] == against["reconnect_vs_storm"] == pytest.approx(1.5)
    assert against["curve_form_vs_plain"] == pytest.approx(2)
    assert against["curve_heartbeat_vs_plain"] == pytest.approx(1.1)
    assert against["fanout_vs_router"] == against["router_curve_heartbeat_vs_plain"] == pytest.approx(1.2)
    assert against["router_curve_form_vs_plain"] == pytest.approx(2.5)


def test_report_shows_the_largest_world_first_and_missing_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_plane, "PEER_MODULES", {TCPSTORE: "torch", GRPC: "a_module_that_nobody_has"})
    made = report({100: found(), 50: found()})
    document = made.document()
    assert problems(document) == []
    assert (document["ours"]["workers_count"], document["ours"]["cpu_us_per_registration"]) == (100, 200)
    assert document["ours"]["by_workers"]["50"]["cpu_us_per_registration"] == 400
    assert document["ratios"]["form_vs_router"] == document["ratios"]["by_workers"]["50"]["form_vs_router"]
    assert document["peers"] == {TCPSTORE: {"form_s": {"100": 1.3, "50": 1.3}}, GRPC: MISSING}
    assert json.loads(json.dumps(document)) == document
    floor = document["floor"]["by_workers"]["50"]
    assert (floor["death_seen_ms"], floor["death_seen_p99_ms"]) == (2, 9)
    lines = people(made).splitlines()
    assert lines[0].split() == ["workers", "100", "50"]
    assert [line.split()[2:] for line in lines if line.startswith("gRPC")] == [[MISSING, MISSING]]


def test_low_descriptor_limit_is_reported_with_the_fix() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert descriptor_problem(10, 2) is None
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard
    crowded = descriptor_problem(hard * 10, 1)
    assert crowded is not None
    assert f"`ulimit -Hn`) is {hard}" in crowded
    assert "--clients 2" in crowded
    assert "--clients" not in (descriptor_problem(hard, 100) or "--clients")


def test_bare_router_sends_messages_of_a_scheduler() -> None:
    for packed, tag in (
        (control_plane_bare.ADMITTED, 20),
        (control_plane_bare.ROUND_OPENED, 24),
        (control_plane_bare.GENERATION_STARTED, 25),
    ):
        assert control_plane_bare.tag_of(packed) == tag
        assert messages.SCHEMA.pack(messages.SCHEMA.unpack(packed)) == packed


def test_cpu_time_is_that_of_the_process() -> None:
    before_s = cpu_s(os.getpid())
    sum(range(100_000))
    assert before_s < cpu_s(os.getpid())
    assert resident_kib(os.getpid()) > 1000


@pytest.mark.system
def test_crowd_works_with_a_real_scheduler() -> None:
    life, kept, mass = control_plane_trials.ours(20, 2, 1.1)
    assert life.beats >= 20
    assert min(life.form_s, life.admit_cpu_s, life.back_s) > 0
    assert life.admit_cpu_s <= life.form_cpu_s
    assert (kept.seats, kept.resumed) == (20, 20)
    assert (mass.lost, mass.rounds) == (10, 1)


@pytest.mark.system
def test_crowd_works_with_a_bare_router_and_a_bare_pub() -> None:
    life = control_plane_trials.bare(20, 2, 1.1)
    assert life.beats >= 20
    assert min(life.form_s, life.told_s, life.back_s) > 0
    assert control_plane_trials.echo(20, 2) > 0
    assert control_plane_trials.publish(20, 2) > 0


@pytest.mark.system
def test_crowd_with_a_secret_is_heard() -> None:
    for life in (control_plane_trials.encrypted(20, 2, 1.1), control_plane_trials.bare_encrypted(20, 2, 1.1)):
        assert life.beats >= 20
    assert life.form_s > 0


@pytest.mark.system
def test_every_victim_is_decided_on() -> None:
    losses = control_plane_trials.losses(12, 2, 4)
    assert len(losses.decision_s) == 4
    assert all(decision_s > 0 for decision_s in losses.decision_s)
    assert losses.decision_s[0] + losses.told_s > 0, "they were notified before the kill"


@pytest.mark.system
def test_tcpstore_is_used_by_its_own_protocol() -> None:
    assert control_plane_trials.peer("tcpstore", 20, 2) > 0


@pytest.mark.system
@pytest.mark.skipif(ETCD is None, reason="no etcd is installed (apt-get install etcd-server)")
def test_registrations_survive_the_loss_of_the_etcds_leaders() -> None:
    extent = control_plane.Extent((40,), 1, 0.0, 0, 2, curve=False)
    made = report_etcd(measure_etcd(extent))
    assert problems(made.document()) == []
    found = made.ours["by_workers"]["40"]
    assert found["registrations_lost_count"] == found["registrations_doubled_count"] == 0
    assert found["journal_at_stop_bytes"] >= found["journal_at_kill_bytes"] >= found["journal_bytes"] // 4 > 0
    assert made.ratios["by_workers"]["40"]["etcd_form_vs_file"] > 0


@pytest.mark.system
@pytest.mark.skipif(ETCD is None, reason="no etcd is installed (apt-get install etcd-server)")
def test_standby_takes_over_from_a_killed_and_from_a_suspended_scheduler() -> None:
    extent = control_plane.Extent((4,), 1, 0.0, 0, 2, curve=False)
    made = report_takeovers(measure_takeovers(extent))
    assert problems(made.document()) == []
    found = made.ours["by_workers"]["4"]
    assert found["killed_takeover_s"] > 0
    assert found["suspended_takeover_s"] > control_plane.LEASE_S / 2, "a renewal may have been just due"


def test_tree_of_relays_forms_fails_over_and_replaces_a_rack() -> None:
    workers = 160  # two processes, each with more than a rack
    document = control_plane_tree.measure([workers], 1, 2, 0.5).document()
    assert problems(document) == []
    ours = document["ours"]["by_workers"][str(workers)]
    assert (ours["inner_relays_count"], ours["hosts_count"]) == (1, 3)
    assert ours["snapshot_bytes"] > workers
