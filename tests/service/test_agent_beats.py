"""Heartbeats of ten thousand agents are spread over the interval."""

from __future__ import annotations

import random
import uuid

from samebits.service.agent import share_of


def test_offset_of_a_session_is_its_own_and_never_zero() -> None:
    shares = sorted(share_of(uuid.uuid4().hex) for _ in range(10_000))
    assert shares[0] > 0 and shares[-1] <= 1
    in_a_tenth = [sum(tenth / 10 < share <= (tenth + 1) / 10 for share in shares) for tenth in range(10)]
    assert min(in_a_tenth) > 800, "10,000 in a second are about 1,000 in each tenth of it"
    assert share_of("0" * 32) > 0 and share_of("f" * 32) == 1


def test_scripts_random_numbers_are_not_touched() -> None:
    random.seed(7)
    before = random.getstate()
    share_of(uuid.uuid4().hex)
    assert random.getstate() == before
