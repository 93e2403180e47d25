"""A process's proof of its origin: only a replacement by the job's launcher has one."""

from __future__ import annotations

from pathlib import Path

import pytest

from samebits.core.membership.replacement_proofs import proof_of
from samebits.service.host import proof_for
from samebits.store import owner
from samebits.store.owner import claim_folder
from tests.service.house import House


@pytest.mark.parametrize(
    ("node", "recovery", "has_token"),
    [("1.1", "1", True), ("1", "1", True), ("1.1", "0", True), ("1.1", "1", False)],
)
def test_only_a_replacement_in_a_launched_job_brings_a_proof(
    tmp_path: Path, node: str, recovery: str, has_token: bool
) -> None:
    log_dir = tmp_path / "device"
    house = House(tmp_path, 2, ENABLE_RECOVERY=recovery, LOG_DIR=str(log_dir))
    if has_token:
        owner.make_token(log_dir)
        claim_folder(log_dir, "job-1", "digits", sync=False)
    brings = (node, recovery, has_token) == ("1.1", "1", True)
    proof = proof_for(house.settings("worker", node), node, "mine")
    assert proof == (proof_of(owner.read_token(log_dir), "job-1", node, "mine") if brings else b"")
    house.pool.shutdown()
