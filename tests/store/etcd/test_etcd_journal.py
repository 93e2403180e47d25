from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from random import Random
from threading import Thread
from typing import Any

import certifi
import pytest

from samebits.errors import (
    ClaimRemovedError,
    ForeignFolderError,
    JournalDamagedError,
    SettingsError,
    StoreError,
    SupersededError,
)
from samebits.etcd_place import EtcdAccess, EtcdPlace
from samebits.store.etcd import etcd_journal
from samebits.store.etcd import gateway as gateway_module
from samebits.store.etcd.etcd_journal import EtcdClaim, EtcdJournal, read_etcd_journal, remove_job
from samebits.store.etcd.gateway import EtcdGateway, EtcdKeyValue
from samebits.store.journal import JOURNAL_FILE, PLACE_FILE, Journal, read_journal, refresh_copies
from samebits.store.term_claim import TermClaim
from tests.store.etcd.etcd_model import Etcd, served

HOLDER = b'{"pid": 1}\n'


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_module, "_PAUSE_S", 0.0)


@pytest.fixture
def etcd() -> Etcd:
    return Etcd()


@pytest.fixture
def place(etcd: Etcd) -> Iterator[EtcdPlace]:
    with served(etcd) as found:
        yield found


def claim_of(place: EtcdPlace, floor: int = 0) -> EtcdClaim:
    return EtcdClaim.take(EtcdGateway(place, EtcdAccess()), HOLDER, floor)


def opened(place: EtcdPlace) -> tuple[EtcdJournal, list[bytes] | None]:
    return EtcdJournal.load(claim_of(place), "journal")


def stored(place: EtcdPlace) -> list[bytes] | None:
    return read_etcd_journal(EtcdGateway(place, EtcdAccess()), "journal")


def test_appends_and_compactions_are_read_back_in_order(place: EtcdPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_journal, "CHUNK_BYTES", 100)
    log, before = opened(place)
    assert before is None
    log.append([b"a", b"", b"b" * 250])
    log.append([b"c"])
    assert stored(place) == [b"a", b"", b"b" * 250, b"c"]
    log.compact([b"snapshot" * 40])
    log.append([b"d"])
    assert opened(place)[1] == stored(place) == [b"snapshot" * 40, b"d"]


def test_claims_rise_above_each_other_and_above_the_floor(place: EtcdPlace) -> None:
    assert [claim_of(place).number, claim_of(place).number, claim_of(place, 7).number] == [1, 2, 8]


def test_superseded_writer_changes_nothing(place: EtcdPlace) -> None:
    former, _ = opened(place)
    former.append([b"a"])
    later, payloads = opened(place)
    assert payloads == [b"a"]
    for write in (former.append, former.compact):
        with pytest.raises(SupersededError, match="another scheduler has claimed term 2, so this scheduler, of term 1"):
            write([b"b"])
        assert stored(place) == [b"a"]
        former._broken = None
    later.append([b"c"])
    assert stored(place) == [b"a", b"c"]


def test_append_cut_off_between_its_chunks_is_dropped_as_a_whole(
    place: EtcdPlace, etcd: Etcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_journal, "CHUNK_BYTES", 100)
    log, _ = opened(place)
    log.append([b"a"])
    log.append([b"b" * 250])
    del etcd.keys[max(key for key in etcd.keys if b"/log/" in key)]
    assert stored(place) == [b"a"]
    log, payloads = opened(place)
    assert payloads == [b"a"]
    log.append([b"c"])
    assert stored(place) == [b"a", b"c"]


@pytest.mark.parametrize("kind", ["missing", "flipped", "foreign", "snapshot", "head"])
def test_changed_journal_is_refused(kind: str, place: EtcdPlace, etcd: Etcd) -> None:
    log, _ = opened(place)
    for payload in (b"a", b"b", b"c"):
        log.append([payload])
    part = b"/snapshot/" if kind == "snapshot" else b"/head" if kind == "head" else b"/log/"
    keys = sorted(key for key in etcd.keys if part in key)
    value, revision = etcd.keys[keys[len(keys) // 2]]
    changed = {"flipped": value[:-1] + bytes([value[-1] ^ 1]), "foreign": etcd.keys[keys[0]][0], "head": b"\x01"}
    if kind in changed:
        etcd.keys[keys[len(keys) // 2]] = (changed[kind], revision)
    else:
        del etcd.keys[keys[len(keys) // 2]]
    with pytest.raises(JournalDamagedError, match="not the journal that was written there"):
        stored(place)
    with pytest.raises(JournalDamagedError):
        opened(place)


def test_etcd_that_answers_with_another_jobs_keys_is_refused_and_left_alone(
    place: EtcdPlace, etcd: Etcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, _ = opened(place)
    log.append([b"a"])
    before, honest = dict(etcd.keys), etcd._range

    def of_another(request: dict[str, Any]) -> dict[str, Any]:
        found = honest(request)
        for one in found["kvs"]:
            key = base64.b64decode(one["key"]).replace(b"/digits/", b"/others/")
            one["key"] = base64.b64encode(key).decode()
        return found

    monkeypatch.setattr(etcd, "_range", of_another)
    for reads in (stored, opened):
        with pytest.raises(StoreError, match=r"a key that was not requested\. Fix: name an etcd's own client ports"):
            reads(place)
    assert etcd.keys == before


def test_removed_claim_is_distinguished_and_everything_can_be_written_again(place: EtcdPlace, etcd: Etcd) -> None:
    log, _ = opened(place)
    log.append([b"a"])
    etcd.keys.clear()
    with pytest.raises(ClaimRemovedError):
        log.append([b"b"])
    log.begin_again([b"a", b"b"], claim_of(place, 1))
    log.append([b"c"])
    assert stored(place) == [b"a", b"b", b"c"]


def test_full_etcd_refuses_an_append_which_can_be_repeated(place: EtcdPlace, etcd: Etcd) -> None:
    log, _ = opened(place)
    etcd.fills = True
    log.append([b"applied, and refused all the same"])
    with pytest.raises(StoreError, match="the etcd's database is full") as refused:
        log.append([b"a"])
    assert refused.value.may_pass
    assert log.goes_on
    etcd.is_full = False
    log.append([b"b"])
    assert stored(place) == [b"applied, and refused all the same", b"b"]


def test_removed_job_leaves_its_term(place: EtcdPlace, etcd: Etcd) -> None:
    log, _ = opened(place)
    log.append([b"a"])
    others = [b"/jobs/digits/night/journal/head", b"/jobs/digits/settings", b"/jobs/digits2/journal/head"]
    etcd.keys |= dict.fromkeys([*others, b"/jobs/digits/serving", b"/jobs/digits/events/000000000000"], (b"", 1))
    remove_job(claim_of(place))
    assert sorted(etcd.keys) == sorted([*others, b"/jobs/digits/term"]), "keys of other jobs and programs stay"
    with pytest.raises(SupersededError):
        log.append([b"b"])
    assert opened(place)[0]._claim.number == 3


def journal_in(folder: Path, place: EtcdPlace | None = None) -> tuple[Journal, list[bytes]]:
    gateway = None if place is None else EtcdGateway(place, EtcdAccess())
    return Journal.open(folder, TermClaim.take(folder, "a scheduler", gateway=gateway))


def test_folder_of_another_job_is_refused_and_stays_as_it_is(tmp_path: Path, place: EtcdPlace) -> None:
    gateway = EtcdGateway(place, EtcdAccess())
    with journal_in(tmp_path / "plain")[0] as journal:
        journal.append([b"a job of this folder"])
    refresh_copies(tmp_path / "plain", gateway)  # a mistyped prefix, under which there is nothing
    with journal_in(tmp_path / "first", place)[0] as journal:
        journal.append([b"a job in the etcd"])
    refresh_copies(tmp_path / "first", gateway)
    before = (tmp_path / "plain" / JOURNAL_FILE).read_bytes()
    for use in (lambda: refresh_copies(tmp_path / "plain", gateway), lambda: journal_in(tmp_path / "plain", place)):
        with pytest.raises(ForeignFolderError, match=r"plain holds another job's journal.* Fix: change to another"):
            use()
    assert (tmp_path / "plain" / JOURNAL_FILE).read_bytes() == before
    other = EtcdGateway(replace(place, prefix="/jobs/dgits"), EtcdAccess())
    for use in (lambda: refresh_copies(tmp_path / "first", other), lambda: journal_in(tmp_path / "first", other.place)):
        with pytest.raises(ForeignFolderError, match=r"the copy of a journal under the prefix /jobs/digits of an etcd"):
            use()
    with pytest.raises(ForeignFolderError, match=r"Fix: export RECOVERY_PATH=etcd://<its hosts>/jobs/digits; if that"):
        journal_in(tmp_path / "first")
    refresh_copies(tmp_path / "second", gateway)
    found = read_journal(tmp_path / "second")
    assert found is not None and found.payloads == [b"a job in the etcd"], "any empty folder may hold a copy"
    assert journal_in(tmp_path / "second", place)[1] == [b"a job in the etcd"]


def test_folders_journal_moves_into_the_etcd_even_if_the_first_attempt_was_killed(
    tmp_path: Path, place: EtcdPlace
) -> None:
    with journal_in(tmp_path)[0] as journal:
        journal.append([b"before"])
    opened(place)  # as far as the killed one came
    assert journal_in(tmp_path, place)[1] == [b"before"] == stored(place)
    (tmp_path / PLACE_FILE).unlink()  # as if killed before that was written
    assert journal_in(tmp_path, place)[1] == [b"before"]


class _NoEtcd(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.send_error(404)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def no_etcd() -> Iterator[EtcdPlace]:
    with HTTPServer(("127.0.0.1", 0), _NoEtcd) as server:
        Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield EtcdPlace.parse(f"etcd://127.0.0.1:{server.server_port}/jobs/digits")
        server.shutdown()


def test_wrong_place_is_named_with_its_fix(place: EtcdPlace, no_etcd: EtcdPlace, tmp_path: Path) -> None:
    nobody = EtcdPlace.parse("etcd://127.0.0.1:1/jobs/digits")
    with pytest.raises(
        StoreError,
        match=r"no member of the etcd cluster has answered for 0\.1 s .*Fix: bring .* back; or check the hosts and po",
    ):
        EtcdGateway(nobody, EtcdAccess(), patience_s=0.1).get("/a")
    with pytest.raises(
        StoreError, match=r"is not a client port of etcd, .*HTTP status 404\). Fix: name the client port"
    ):
        EtcdGateway(no_etcd, EtcdAccess()).get("/a")
    with pytest.raises(StoreError, match=r":\d+ does not use TLS\. Fix: unset ETCDCTL_CACERT and ETCDCTL_CERT"):
        EtcdGateway(place, EtcdAccess(authority=Path(certifi.where()))).get("/a")
    empty = tmp_path / "empty.pem"
    empty.touch()
    for access, why in (
        (EtcdAccess(authority=tmp_path / "no.pem"), r"ETCDCTL_CACERT=\S*no\.pem: .*No such file.*Fix: export these"),
        (EtcdAccess(authority=empty), r"ETCDCTL_CACERT=\S*empty\.pem: .*Fix: export these"),
        (EtcdAccess(certificate=empty, key=tmp_path / "k"), r"ETCDCTL_CERT=\S*empty\.pem ETCDCTL_KEY=\S*k: .*Fix: exp"),
    ):
        with pytest.raises(SettingsError, match=why):
            EtcdGateway(place, access)


@pytest.mark.parametrize(
    "seed", [*range(12), *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(12, 200))]
)
def test_nothing_is_lost_or_doubled_when_writes_are_lost_unanswered_or_late(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several schedulers in turn; each may believe itself alone until it writes."""
    monkeypatch.setattr(etcd_journal, "CHUNK_BYTES", 60)
    random = Random(seed)
    etcd = Etcd(seed, *(random.choice((0.0, 0.1, 0.3)) for _ in range(4)))
    confirmed: list[bytes] = []
    with served(etcd) as place:
        current, payloads = opened(place)
        former = current
        for number in range(50):
            payload = b"%d " % number * random.randint(1, 40)
            match random.randrange(12):
                case 0:
                    former, (current, payloads) = current, opened(place)
                    assert payloads == confirmed
                case 1:
                    current.compact(confirmed)
                case 2 if former is not current:
                    with pytest.raises((SupersededError, StoreError)):
                        former.append([payload])
                case _:
                    current.append([payload])
                    confirmed.append(payload)
            assert stored(place) == confirmed


def test_read_that_meets_a_compaction_between_snapshot_and_appends_is_repeated(place: EtcdPlace) -> None:
    log, _ = opened(place)
    log.append([b"a"])
    log.append([b"b"])

    class Reader(EtcdGateway):
        has_met = False

        def under(self, prefix: str, *, has_values: bool = True) -> Iterator[EtcdKeyValue]:
            if prefix.endswith("/log/") and not self.has_met:
                self.has_met = True
                log.compact([b"a", b"b"])
            return super().under(prefix, has_values=has_values)

    assert read_etcd_journal(Reader(place, EtcdAccess()), "journal") == [b"a", b"b"]


def test_journal_that_a_successor_compacts_during_the_load_is_not_opened(place: EtcdPlace) -> None:
    log, _ = opened(place)
    log.append([b"a"])

    class Overtaken(EtcdGateway):
        has_met = False

        def under(self, prefix: str, *, has_values: bool = True) -> Iterator[EtcdKeyValue]:
            if prefix.endswith("/log/") and not self.has_met:
                self.has_met = True
                opened(place)[0].compact([b"a"])
            return super().under(prefix, has_values=has_values)

    with pytest.raises(SupersededError):
        EtcdJournal.load(EtcdClaim.take(Overtaken(place, EtcdAccess()), HOLDER), "journal")


@pytest.mark.parametrize("seed", range(6))
def test_claim_reads_every_append_although_a_member_answers_from_an_earlier_state(seed: int) -> None:
    random, etcd, confirmed = Random(seed), Etcd(seed), list[bytes]()
    with served(etcd) as place:
        reader, last = EtcdGateway(place, EtcdAccess()), list[bytes]()
        current, _ = opened(place)
        for number in range(30):
            current.append([b"%d" % number])
            confirmed.append(b"%d" % number)
            match random.randrange(5):
                case 0:
                    etcd.suspend_a_member()
                case 1:
                    current, payloads = opened(place)
                    assert payloads == confirmed
                case 2:
                    current.compact(confirmed)
            now = read_etcd_journal(reader, "journal") or []
            assert len(last) <= len(now)
            assert now == confirmed[: len(now)]
            last = now


def test_file_left_by_a_killed_scheduler_is_removed(tmp_path: Path, place: EtcdPlace) -> None:
    left = [tmp_path / f".{name}.tmp-1-4711" for name in (PLACE_FILE, JOURNAL_FILE)]
    for path in left:
        path.write_bytes(b"/jobs/digi")
    journal_in(tmp_path, place)[0].close()
    assert not any(path.exists() for path in left)
