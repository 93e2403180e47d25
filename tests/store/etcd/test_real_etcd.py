"""The journal in three real etcd servers, whose leader is killed or stopped while it is written."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from samebits.errors import StoreError
from samebits.etcd_place import EtcdAccess
from samebits.store.etcd.etcd_journal import EtcdClaim, EtcdJournal, read_etcd_journal
from samebits.store.etcd.gateway import EtcdGateway
from samebits.store.journal import Journal, read_journal
from samebits.store.term_claim import TermClaim
from tests.store.etcd.etcd_cluster import ETCD, EtcdCluster, cluster_in

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
    assert read_etcd_journal(gateway, "journal") == written
    copy = read_journal(folder)
    assert copy is not None
    assert copy.payloads == written


def test_append_waits_for_a_lost_majority_and_is_written_once(cluster: EtcdCluster) -> None:
    log, _ = EtcdJournal.load(EtcdClaim.take(EtcdGateway(cluster.place(), EtcdAccess()), b"a scheduler"), "journal")
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
    assert read_etcd_journal(EtcdGateway(cluster.place(), EtcdAccess()), "journal") == [
        b"before",
        b"meanwhile",
        b"after",
    ]


def test_full_database_refuses_in_one_sentence_and_loses_nothing(tmp_path: Path) -> None:
    with cluster_in(tmp_path / "etcd", "--quota-backend-bytes", str(1 << 20), members=1) as cluster:
        gateway = EtcdGateway(cluster.place(), EtcdAccess())
        log, _ = EtcdJournal.load(EtcdClaim.take(gateway, b"a scheduler"), "journal")
        confirmed: list[bytes] = []
        with pytest.raises(StoreError, match=r"the etcd's database is full .*; nothing was written\. Fix: make room"):
            for number in range(100):
                payload = b"%d " % number * 20_000
                log.append([payload])
                confirmed.append(payload)
        assert 0 < len(confirmed) < 100
        assert log.goes_on
        assert read_etcd_journal(gateway, "journal") == confirmed


def certificates(folder: Path) -> EtcdAccess:
    """Make an authority and, signed by it, the certificates ``server`` and ``client``."""
    folder.mkdir()

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    (folder / "server.ext").write_text("subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n")
    (folder / "client.ext").write_text("extendedKeyUsage=clientAuth\n")
    new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *new, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=an authority", "-days", "2")
    for name in ("server", "client"):
        # without a CN: an etcd's gateway shows the server's certificate to the etcd itself, which refuses a named one
        openssl("req", *new, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/O={name}")
        signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", f"{name}.ext")
        openssl("x509", "-req", "-in", f"{name}.csr", *signed, "-out", f"{name}.pem")
    return EtcdAccess(folder / "ca.pem", folder / "client.pem", folder / "client.key")


@pytest.mark.skipif(not (shutil.which("openssl") and shutil.which("etcdctl")), reason="no openssl or no etcdctl")
def test_etcd_with_tls_and_passwords_admits_only_the_right_client(tmp_path: Path) -> None:
    made, folder = certificates(tmp_path / "tls"), tmp_path / "tls"
    files = ("--cert-file", str(folder / "server.pem"), "--key-file", str(folder / "server.key"))
    verify = ("--client-cert-auth", "--trusted-ca-file", str(folder / "ca.pem"))
    with cluster_in(tmp_path / "etcd", *files, *verify, members=1, access=made) as cluster:

        def etcdctl(*words: str) -> None:
            shown = {"ETCDCTL_CACERT": made.authority, "ETCDCTL_CERT": made.certificate, "ETCDCTL_KEY": made.key}
            environment = os.environ | {name: str(path) for name, path in shown.items()} | {"ETCDCTL_API": "3"}
            command = ["etcdctl", "--endpoints", cluster.url(0), *words]
            subprocess.run(command, env=environment, check=True, capture_output=True, timeout=30)

        for words in (
            ("user", "add", "root:root"),
            ("user", "add", "trainer:secret"),
            ("user", "add", "other:secret"),
            ("role", "add", "jobs"),
            ("role", "grant-permission", "--prefix", "jobs", "readwrite", "/jobs/digits/"),
            ("user", "grant-role", "trainer", "jobs"),
            ("auth", "enable"),
        ):
            etcdctl(*words)
        access = replace(made, user="trainer", password="secret")
        gateway = EtcdGateway(cluster.place(), access)
        log, _ = EtcdJournal.load(EtcdClaim.take(gateway, b"a scheduler"), "journal")
        log.append([b"a"])
        assert read_etcd_journal(gateway.another(), "journal") == [b"a"]
        elsewhere = certificates(tmp_path / "others")
        for wrong, why in (
            (replace(access, authority=elsewhere.authority), r"not accepted .*Fix: export ETCDCTL_CACERT"),
            (replace(access, certificate=None, key=None), r"does not accept this client.*Fix: export ETCDCTL_CERT"),
            (replace(access, password="guessed"), r"refuses: .*invalid user ID or password\. Fix: .*ETCDCTL_USER"),
            (replace(access, user="other"), r"refuses: .*permission denied\. Fix: .*ETCDCTL_USER"),
        ):
            with pytest.raises(StoreError, match=why):
                EtcdGateway(cluster.place(), wrong, patience_s=3.0).get("/jobs/digits/term")
