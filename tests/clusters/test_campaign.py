"""The campaign of random faults over three hosts, and its check of journals."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from samebits.core import records
from samebits.core.records import GenerationCommitted, Record, SeatGranted, TermStarted
from samebits.store.journal import Journal
from tests.clusters.campaign import Campaign, faults_in
from tests.core.house import House


def journal_of(folder: Path, history: Sequence[Record], claims: Sequence[int] = (1,)) -> Path:
    folder.mkdir()
    journal, _ = Journal.open(folder)
    with journal:
        journal.append([records.SCHEMA.pack(record) for record in history])
    for term in claims:
        (folder / f"term.{term}").touch()
    return folder


def trained() -> list[Record]:
    """Return the journal of a training job of two."""
    house = House()
    house.fill().train()
    return list(house.journal)


def test_correct_journal_has_no_faults(tmp_path: Path) -> None:
    history = trained()
    assert {GenerationCommitted, SeatGranted, TermStarted} <= {type(record) for record in history}
    assert faults_in(journal_of(tmp_path / "recovery", history)) == []


@pytest.mark.parametrize("kind", [GenerationCommitted, TermStarted, SeatGranted])
def test_duplicate_grant_is_found(kind: type[Record], tmp_path: Path) -> None:
    history = trained()
    again = next(record for record in history if isinstance(record, kind))
    [fault] = faults_in(journal_of(tmp_path / "recovery", [*history, again]))
    assert "do not rise" in fault or "given twice" in fault


def test_leftover_claim_is_found(tmp_path: Path) -> None:
    [fault] = faults_in(journal_of(tmp_path / "recovery", trained(), claims=(1, 2)))
    assert fault == "claims are left over: ['term.1', 'term.2']"


@pytest.mark.system
@pytest.mark.thorough
def test_some_faults_change_no_bit(can_have_hosts: None, tmp_path: Path) -> None:
    campaign = Campaign(tmp_path, seed=1)
    try:
        assert campaign.run_job(6) == []
    finally:
        campaign.close()
    assert campaign.done.total() == 6
