"""Audits: which rank recomputes whose gradient, which result is trusted, and what follows."""

from __future__ import annotations

import pytest

from samebits.core.reports import MAX_ANOMALY_CHARS
from samebits.core.watch.audits import (
    AuditResult,
    Follows,
    Known,
    Roles,
    follows,
    judge,
    roles,
    sentence,
    teller,
    why_it_ends,
)

THREE, TWO = Roles(1, 2, 0), Roles(1, 0, None)


@pytest.mark.parametrize("world_size", [2, 3, 4, 7])
def test_every_rank_is_audited_in_turn_by_another(world_size: int) -> None:
    found = [roles(step, 50, world_size) for step in range(50, 50 * (world_size + 1), 50)]
    assert sorted(one.audited for one in found if one) == list(range(world_size))
    for one in found:
        assert one is not None
        names = [rank for rank in (one.audited, one.auditor, one.third) if rank is not None]
        assert len(set(names)) == len(names) == min(world_size, 3)
        assert all(0 <= rank < world_size for rank in names)


def test_other_steps_and_a_world_of_one_have_no_audit() -> None:
    assert [roles(step, 50, 3) for step in (1, 49, 51, 99)] == [None] * 4
    assert roles(50, 0, 3) is None
    assert roles(50, 50, 1) is None


def test_majority_of_three_decides() -> None:
    expected = {
        (0, 0, 0): AuditResult.NOBODY, (0, 0, 1): AuditResult.NOBODY, (0, 1, 1): AuditResult.AUDITED, (0, 1,
        0): AuditResult.AUDITOR,
        (0, 1, 2): AuditResult.UNKNOWN,
    }  # fmt: skip
    for values, fault in expected.items():
        assert judge(THREE, dict(zip((1, 2, 0), values, strict=True)), own=1, times=1) is fault


def test_of_two_neither_is_trusted() -> None:
    assert judge(TWO, {0: 4, 1: 5}, own=4, times=1) is AuditResult.UNKNOWN
    assert judge(TWO, {0: 5, 1: 5}, own=5, times=2) is AuditResult.NOBODY


@pytest.mark.parametrize("who", [THREE, TWO])
def test_repeated_difference_that_is_not_the_devices_is_the_loops(who: Roles) -> None:
    def fault(audited: int, auditor: int, third: int, own: int, times: int = 2) -> AuditResult:
        return judge(who, {1: audited, who.auditor: auditor, **({} if who.third is None else {0: third})}, own, times)

    assert fault(7, 4, 4, own=4) is AuditResult.LOOP  # part of the gradient arrives another way
    assert fault(7, 4, 5, own=6) is AuditResult.LOOP  # no computation repeats exactly
    assert fault(7, 4, 4, own=4, times=1) is not AuditResult.LOOP  # a transient error
    broken = AuditResult.UNKNOWN if who.third is None else AuditResult.AUDITED
    assert fault(7, 4, 4, own=7) is broken  # it computes the audit wrongly
    if who.third is not None:
        assert fault(7, 4, 4, own=8) is broken
        assert fault(7, 4, 7, own=4) is AuditResult.AUDITOR


def test_wrong_gradient_is_recomputed_once_and_an_auditors_error_costs_no_step() -> None:
    for fault in AuditResult:
        first, second = (follows(fault, times) for times in (1, 2))
        if fault in (AuditResult.NOBODY, AuditResult.AUDITOR):
            assert first is second is Follows.GO_ON
        elif fault is AuditResult.LOOP:
            assert second is Follows.GIVE_UP
        else:
            assert (first, second) == (Follows.TAKE_AGAIN, Follows.STOP)


def test_faulty_rank_reports_it() -> None:
    assert [teller(THREE, fault) for fault in (AuditResult.AUDITED, AuditResult.AUDITOR, AuditResult.UNKNOWN)] == [
        1,
        2,
        1,
    ]


def test_messages_name_ranks_and_parameter() -> None:
    said = sentence(THREE, AuditResult.AUDITED, "0.weight", Follows.TAKE_AGAIN)
    assert "rank 1's gradient of 0.weight is not what rank 2 and rank 0 compute" in said
    assert said.endswith("repeat the step")
    assert "rank 2's device is at fault" in sentence(THREE, AuditResult.AUDITOR, "0.weight", Follows.GO_ON)
    assert "on rank 1, 0: it is unknown" in sentence(TWO, AuditResult.UNKNOWN, "0.weight", Follows.TAKE_AGAIN)
    assert sentence(TWO, AuditResult.UNKNOWN, "0.weight", Follows.STOP).endswith("repeated; the job ends")


@pytest.mark.parametrize("fault", list(AuditResult))
def test_scheduler_accepts_the_longest_message(fault: AuditResult) -> None:
    who, part = Roles(10_000, 10_001, 10_002), "encoder.layers.31.attention.output.weight"
    assert len(sentence(who, fault, part, Follows.TAKE_AGAIN)) <= MAX_ANOMALY_CHARS


def test_last_checkpoint_before_the_last_clean_audit_is_named() -> None:
    said = why_it_ends(300, "it differs", THREE, Known(250, 200))
    assert said.startswith("step 300: it differs. ") and "last found right at step 250" in said
    assert "samebits ckpt export 0/200 clean --format dcp" in said
    assert "no checkpoint is that old" in why_it_ends(300, "", THREE, Known(250, 0))
    assert "No audit in this process" in why_it_ends(300, "", THREE, Known())
