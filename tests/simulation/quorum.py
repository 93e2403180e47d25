"""The etcd of a run whose journal is in one: the model etcd without sockets, below the real code of ``store.etcd``.

A write may be lost, answered late, answered never, or applied twice, and a cluster without a leader answers nothing for
a while. Writes that are still on the way when their scheduler dies are applied under its successor. Every random number
comes from a separate stream, so runs with a journal on disk do not change.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec

from samebits.errors import StoreError, SupersededError
from samebits.etcd_place import EtcdAccess, EtcdPlace
from samebits.store.etcd import etcd_journal
from samebits.store.etcd.etcd_journal import EtcdClaim, EtcdJournal
from samebits.store.etcd.gateway import EtcdGateway, _PassingError
from samebits.store.journal import Journal
from tests.simulation.disk import Disk
from tests.simulation.trace import Violation
from tests.store.etcd.etcd_model import Etcd

PLACE: Final = EtcdPlace.parse("etcd://m0,m1,m2/jobs/simulated")
ATTEMPTS: Final = 6
"""Attempts per request: stands for the gateway's patience."""
CHUNK_BYTES: Final = 150
"""Small enough that many appends and every snapshot take several values."""

_FULL: Final = {"code": 8, "message": "etcdserver: mvcc: database space exceeded"}
_HOLDER: Final = b'{"pid": 1}\n'
_Answer = TypeVar("_Answer", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class QuorumFaults:
    """Shares of the requests that meet each fault."""

    lost: float = 0.0
    unanswered: float = 0.0
    late: float = 0.0
    twice: float = 0.0
    leaderless: float = 0.0
    suspended: float = 0.0
    """The share after which a member answers half of the reads from the state at this moment."""

    @classmethod
    def drawn(cls, rng: random.Random) -> QuorumFaults:
        """Return faults of which each is absent from half of the runs."""
        lost, unanswered, late, twice = (rng.choice((0.0, 0.0, 0.05, 0.2)) for _ in range(4))
        leaderless, suspended = (rng.choice((0.0, 0.0, 0.01, 0.03)) for _ in range(2))
        return cls(lost, unanswered, late, twice, leaderless, suspended)


class _Gateway(EtcdGateway):
    """The real gateway with direct calls in place of HTTP, and a number of attempts in place of seconds."""

    def __init__(self, quorum: Quorum) -> None:
        super().__init__(PLACE, EtcdAccess())
        self.is_superseded = False
        self._quorum = quorum

    def _ask(self, path: str, request: dict[str, Any], kind: type[_Answer]) -> _Answer:
        for _ in range(ATTEMPTS):
            answer = self._quorum.answer(path, request, in_process=not self.is_superseded)
            if answer is None:
                continue
            try:
                if "code" in answer:
                    self._raise(PLACE.members[0], 503, msgspec.json.encode(answer))
                decoded = msgspec.convert(answer, kind, strict=False)
                self._require_no_earlier_state(PLACE.members[0], decoded.header.revision)
                return decoded
            except _PassingError:
                continue
        raise StoreError(f"{PLACE}: no member of the etcd answers")


class _Claim:
    """A scheduler's claim in the etcd. The claim in the folder is modelled as the folder's lock."""

    def __init__(self, in_etcd: EtcdClaim) -> None:
        self.in_etcd = in_etcd
        self.number = in_etcd.number
        self.tag = f"{in_etcd.number}-"

    def require(self) -> None:
        self.in_etcd.require()

    def require_file(self) -> None:
        pass


class Quorum:
    """The etcd of one run.

    Attributes:
        term: the number of the last claim.
    """

    def __init__(self, faults: QuorumFaults, disk: Disk, rng: random.Random, count: Callable[[str], None]) -> None:
        self.term = 0
        self._disk = disk
        self._rng = rng
        self._count = count
        self._model = Etcd(rng.getrandbits(32), faults.lost, faults.unanswered, faults.late, faults.twice)
        self._leaderless = faults.leaderless
        self._suspended = faults.suspended
        self._silent = 0  # how many requests will not be answered
        self._gateway = _Gateway(self)
        self._superseded: list[tuple[EtcdJournal, list[bytes]]] = []

    def calm_down(self) -> None:
        """Writes on the way are still applied, but no further fault happens."""
        self._model.faults = (0.0, 0.0, 0.0, 0.0)
        self._leaderless, self._suspended, self._silent = 0.0, 0.0, 0
        self._model.stale = None

    def open(self, folder: Any) -> tuple[Journal, list[bytes]]:
        """Claim the job and open its journal, as at a scheduler's start."""
        self._gateway = _Gateway(self)
        claim = _Claim(EtcdClaim.take(self._gateway, _HOLDER))
        self.term = claim.number
        return Journal.open(folder, claim)  # type: ignore[arg-type]

    def wipe(self) -> None:
        """Remove all keys of the job while no scheduler runs."""
        self._model.keys.clear()
        self._model.stale = None

    def journals(self) -> int:
        """Return how many journals the etcd holds, including those that no head names."""
        base = f"{PLACE.prefix}/journal/".encode()
        return len(
            {key[len(base) :].partition(b"/")[0] for key in self._model.keys if key.startswith(base)} - {b"head"}
        )

    # ---- schedulers that were superseded

    def supersede(self, journal: Journal, payloads: Sequence[bytes]) -> None:
        """Another scheduler takes over; the present one writes these payloads when it resumes."""
        assert journal._in_etcd is not None
        self._gateway.is_superseded = True
        self._superseded.append((journal._in_etcd, list(payloads)))

    def resume_superseded(self) -> None:
        """The scheduler that was superseded first resumes: its append must fail, or it would send messages.

        If its successor died before the claim, the old claim still stands; then the old scheduler is killed instead.
        """
        log, payloads = self._superseded.pop(0)
        claim = log._claim.condition
        if self._model.keys.get(claim.key.encode(), (b"", 0))[0] == claim.value:
            return
        with small_chunks():
            try:
                log.append(payloads)
            except (SupersededError, StoreError) as error:
                self._count(f"superseded scheduler stopped by {type(error).__name__}")
                return
        raise Violation("S13", "an append of a superseded scheduler was confirmed")

    # ---- requests

    def answer(self, path: str, request: dict[str, Any], *, in_process: bool) -> dict[str, Any] | None:
        """Return the etcd's answer, or None; the running process may die at each of its writes."""
        if self._silent:
            self._silent -= 1
            return None
        if self._suspended and self._rng.random() < self._suspended:
            self._count("etcd member suspended")
            self._model.suspend_a_member()
        if self._leaderless and self._rng.random() < self._leaderless:
            self._count("etcd without a leader")
            self._silent = self._rng.randint(1, 2 * ATTEMPTS)
            self._model.lose_leader()
            return None
        if not in_process or path == "kv/range":
            return self._model.answer(f"/v3/{path}", request)
        found: list[dict[str, Any] | None] = []
        try:
            self._disk.change(lambda: found.append(self._model.answer(f"/v3/{path}", request)))
        except OSError as error:
            return _FULL if error.errno == errno.ENOSPC else None
        return found[0]


@contextmanager
def small_chunks() -> Iterator[None]:
    """Split appends and snapshots into small values within the block."""
    before, etcd_journal.CHUNK_BYTES = etcd_journal.CHUNK_BYTES, CHUNK_BYTES  # type: ignore[misc]
    try:
        yield
    finally:
        etcd_journal.CHUNK_BYTES = before  # type: ignore[misc]
