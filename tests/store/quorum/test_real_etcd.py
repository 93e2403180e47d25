"""The journal in three real etcd servers, whose leader is killed or stopped while it is written."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from samebits.errors import StoreError
from samebits.etcd_place import EtcdAccess
from samebits.store.journal import Journal, read_journal
from samebits.store.quorum.gateway import EtcdGateway
from samebits.store.quorum.log import QuorumClaim, QuorumLog, read_log
from samebits.store.term_claim import TermClaim
from tests.store.quorum.etcd_cluster import ETCD, EtcdCluster, cluster_in

pytestmark = pytest.mark.skipif(ETCD is None, reason="no etcd is installed (apt-get install etcd-server)")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[EtcdCluster]:
    with cluster_in(tmp_path / "etcd") as found:
        yield found


def test_journal_and_its_copy_keep_every_record_while_leaders_die_and_stop(
    tmp_path: Path, cluster: EtcdCluster
) -> None:
    waits: list[str] = []
    gateway = EtcdGateway(cluster.place(), EtcdAccess(), waits.append)
    folder = tmp_path / "recovery"
    journal, _ = Journal.open(folder, TermClaim.take(folder, "a scheduler", gateway=gateway))
    written: list[bytes] = []

    def write(many: int) -> None:
        for _ in range(many):
            written.append(b"%d " % len(written) * 50)
            journal.append([written[-1]])

    with journal:
        write(20)
        killed = cluster.leader()
        assert killed is not None
        cluster.signal(killed, signal.SIGKILL)
        write(20)
        cluster.start(killed)
        cluster.wait_ready()
        journal.compact(written)
        stopped = cluster.leader()
        assert stopped is not None
        cluster.signal(stopped, signal.SIGSTOP)
        write(20)
        cluster.signal(stopped, signal.SIGCONT)
        write(20)
    assert read_log(gateway, "journal") == written
    copy = read_journal(folder)
    assert copy is not None
    assert copy.payloads == written


def test_append_waits_for_a_lost_majority_and_is_written_once(cluster: EtcdCluster) -> None:
    log, _ = QuorumLog.load(QuorumClaim.take(EtcdGateway(cluster.place(), EtcdAccess()), b"a scheduler"), "journal")
    log.append([b"before"])
    for member in (0, 1):
        cluster.signal(member, signal.SIGKILL)
    writer = threading.Thread(target=log.append, args=([b"meanwhile"],))
    writer.start()
    writer.join(1.0)
    assert writer.is_alive()
    for member in (0, 1):
        cluster.start(member)
    writer.join()
    log.append([b"after"])
    assert read_log(EtcdGateway(cluster.place(), EtcdAccess()), "journal") == [b"before", b"meanwhile", b"after"]


def test_full_database_refuses_in_one_sentence_and_loses_nothing(tmp_path: Path) -> None:
    with cluster_in(tmp_path / "etcd", "--quota-backend-bytes", str(1 << 20), members=1) as cluster:
        gateway = EtcdGateway(cluster.place(), EtcdAccess())
        log, _ = QuorumLog.load(QuorumClaim.take(gateway, b"a scheduler"), "journal")
        confirmed: list[bytes] = []
        with pytest.raises(StoreError, match=r"the etcd's database is full .*; nothing was written\. Fix: make room"):
            for number in range(100):
                payload = b"%d " % number * 20_000
                log.append([payload])
                confirmed.append(payload)
        assert 0 < len(confirmed) < 100
        assert log.goes_on
        assert read_log(gateway, "journal") == confirmed
