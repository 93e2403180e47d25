"""The targets of the campaigns, on what hypothesis thinks of: anybody's bytes, and good inputs with some changed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.targets import TARGETS

EXAMPLES = 1500
LONGEST = 600

patient = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
targets = pytest.mark.parametrize("name", TARGETS)
changes = st.lists(st.tuples(st.integers(0, 4095), st.integers(0, 255)), min_size=1, max_size=6)


@targets
def test_good_inputs_are_taken(name: str) -> None:
    seeds = list(TARGETS[name].seeds())
    assert seeds
    for seed in seeds:
        TARGETS[name].check(seed)


@targets
@patient
@given(data=st.binary(max_size=LONGEST))
def test_any_bytes_are_read_or_refused_in_a_sentence(name: str, data: bytes) -> None:
    TARGETS[name].check(data)


@targets
@patient
@given(data=st.data(), changed=changes, cut=st.integers(0, 4))
def test_a_good_input_that_was_changed_is_read_or_refused(
    name: str, data: st.DataObject, changed: list[tuple[int, int]], cut: int
) -> None:
    damaged = bytearray(data.draw(st.sampled_from(list(TARGETS[name].seeds()))))
    for at, value in changed:
        damaged[at % len(damaged)] = value
    TARGETS[name].check(bytes(damaged[: len(damaged) - cut]))


def test_a_defect_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that accepts everything would find nothing."""
    from tests.fuzz import decoder

    monkeypatch.setattr(decoder.messages.SCHEMA, "unpack", lambda data: 1 / len(data))
    with pytest.raises(ZeroDivisionError):
        TARGETS["decoder"].check(b"")


def test_an_input_can_be_shown_again(tmp_path: Path, repository: Path) -> None:
    (tmp_path / "input").write_bytes(b"\x93\x01\x02")
    command = [sys.executable, "-m", "tests.fuzz", "--target", "decoder", "--reproduce", str(tmp_path / "input")]
    shown = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=60, check=False)
    assert shown.returncode == 0, shown.stderr
    assert "shows no defect" in shown.stdout
