"""A rank of torchrun's: which agents can be served, and where its job's scheduler listens."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from samebits import config
from samebits.config import TorchrunSeat
from samebits.errors import SettingsError
from samebits.service import torchrun_seat
from samebits.service.torchrun_seat import WORKERS, agreed_port, offer, offered_port
from samebits.store.process_identity import ProcessIdentity

SEAT = TorchrunSeat(3, 4, 1, "digits", has_our_rendezvous=False, scheduler=None)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torchrun_seat, "launcher_of_session", ProcessIdentity.current)
    return tmp_path


def told(seat: TorchrunSeat, folder: Path) -> dict[str, str]:
    return torchrun_seat._told(seat, folder, config.read({}, role_required=False)[0])


def test_ranks_of_one_node_agree_on_a_free_port_and_others_get_the_agents(folder: Path) -> None:
    first, second = told(SEAT, folder), told(replace(SEAT, rank=0), folder)
    assert (first["WORKER_NUM"], first["NODE_ID"], second["NODE_ID"], first["SPARE_NUM"]) == ("4", "3", "0", "0")
    assert first["SCHED_PORT"] == second["SCHED_PORT"] and first["RECOVERY_PATH"] == "recovery"
    ours = told(replace(SEAT, nodes=2, has_our_rendezvous=True, scheduler=("node0", 8119)), folder)
    assert (ours["SCHED_HOST"], ours["SCHED_PORT"], ours["JOB_NAME"]) == ("node0", "8119", "digits")
    assert ours["RECOVERY_PATH"] == f"recovery/{WORKERS}", "the agents' journal is above it"


def test_journal_in_an_etcd_is_refused(folder: Path) -> None:
    settings = config.read({"RECOVERY_PATH": "etcd://node0:2379/digits"}, role_required=False)[0]
    with pytest.raises(SettingsError, match=r"RECOVERY_PATH names an etcd.*Fix: export RECOVERY_PATH=<a folder"):
        torchrun_seat._told(SEAT, folder, settings)


@pytest.mark.parametrize(
    ("seat", "fix"),
    [
        (replace(SEAT, nodes=2), "on 2 nodes with another rendezvous backend.*Fix: add --rdzv-backend=samebits"),
        (replace(SEAT, has_our_rendezvous=True), "no agent.*Fix: run torchrun on that machine"),
    ],
)
def test_agents_that_cannot_be_served_are_refused_in_one_sentence(seat: TorchrunSeat, fix: str, folder: Path) -> None:
    with pytest.raises(SettingsError, match=fix) as raised:
        told(seat, folder)
    assert len(raised.value.problems) == 1


def test_second_torchrun_in_a_folder_is_refused_until_the_first_is_gone(folder: Path) -> None:
    path, me = folder / "recovery", ProcessIdentity.current()
    parent = ProcessIdentity.of(os.getppid())
    assert parent is not None
    port = agreed_port(path, ["127.0.0.1"], parent)
    with pytest.raises(SettingsError, match=f"pid {parent.pid}.*pid {me.pid}.*Fix: start this one in another folder"):
        agreed_port(path, ["127.0.0.1"], me)
    agreed_port(path, ["127.0.0.1"], ProcessIdentity(parent.pid, parent.started_at))
    (folder / "recovery.torchrun").write_text(f"{port} elsewhere 1 1\n")
    assert agreed_port(path, ["127.0.0.1"], me) == port, "its pid means nothing here, the journal's lock decides"
    (folder / "recovery.torchrun").write_bytes(b"\xff\0 4")
    assert agreed_port(path, ["127.0.0.1"], me) > 0


def test_agents_offer_one_port_on_each_of_the_endpoints(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int]] = []
    monkeypatch.setattr(config, "offer_scheduler", lambda host, port: seen.append((host, port)))
    one, several, file = (
        config.read({"SCHED_HOST": host}, role_required=False)[0]
        for host in ("127.0.0.1", "127.0.0.1:8118,127.0.0.2:8118", "file:/etc/schedulers")
    )
    port = offered_port(one, folder)
    offer(one, port)
    offer(several, 9000)
    offer(several, 0)
    assert seen == [("127.0.0.1", port), ("127.0.0.1:9000,127.0.0.2:9000", 9000), ("", 0)]
    assert offered_port(file, folder) == 0
