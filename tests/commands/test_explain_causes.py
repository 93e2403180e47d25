"""``samebits explain causes`` agrees with the code, and includes a job's own rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from samebits.__main__ import main
from samebits.commands.explain import SAYS, cause_table, cause_table_zh, says
from samebits.core.causes.table import DEFAULT, TABLE, UNKNOWN, Observation, Row
from samebits.core.hangs import SILENT_KINDS, Hang
from samebits.core.reports import Phase
from samebits.core.watch.hang_culprits import Member, find_culprits, sentence
from samebits.errors import SettingsError
from samebits.service.cause_file import table_of
from tests.core.test_core_hang_judge import SLEEPS, WAITS
from tests.launcher.test_hang_stacks import settings_in

AT = {
    Hang.STUCK: SLEEPS,
    Hang.BUSY: SLEEPS._replace(rests=False, place="train.py:46 (evaluate)"),
    Hang.LOADING: SLEEPS._replace(phase=Phase.DATA, place="train.py:46 (read)"),
    Hang.SAVING: SLEEPS._replace(phase=Phase.STORING, place="train.py:46 (state.commit)"),
    Hang.COMPILING: SLEEPS._replace(phase=Phase.COMPILING, place="train.py:46 (model)"),
    Hang.APART: WAITS._replace(collectives=811),
    Hang.LINK: WAITS,
}


@pytest.mark.parametrize("hang", sorted(set(Hang) - SILENT_KINDS, key=str))
def test_page_quotes_the_actual_messages(hang: Hang) -> None:
    others = [Member(str(node), 10, SLEEPS if hang is Hang.NOBODY_WAITS else WAITS) for node in range(2)]
    found = find_culprits([*others, Member("2", 10, AT.get(hang, SLEEPS))])
    assert found.common is hang or [one for _, one in found.culprits] == [hang]
    assert SAYS[hang] in sentence(found, 12.0)


def test_every_cause_has_a_row_in_both_languages_and_no_cell_breaks_the_table() -> None:
    for table in (cause_table(), cause_table_zh()):
        lines = table.splitlines()
        assert len(lines) == 2 + len(TABLE) and {line.count("|") for line in lines} == {7}
    assert all(says(row) for row in TABLE[:-1])


@pytest.mark.parametrize("row", [row for row in TABLE if row is not UNKNOWN], ids=lambda row: row.fault)
def test_each_quoted_example_is_a_message_of_its_own_row(row: Row) -> None:
    """A quoted text, seen as the row's kind of fact, is judged by this row and no other."""
    if row.is_failure or row.texts:
        for text in row.texts or ("failed at train.py:88: KeyError: 'x'",):
            seen = Observation(error=text, is_failure=bool(row.is_failure))
            assert DEFAULT.of(seen) is row and text in says(row)
    facts = [Observation(hang=one) for one in row.hangs] + [Observation(notice=one) for one in row.notices]
    facts += [Observation(signal=one) for one in row.signals if len(row.signals) < 9]
    facts += [Observation(status=one) for one in row.statuses if len(row.statuses) < 256]
    facts += [Observation(is_out_of_memory=True)] if row.is_out_of_memory else []
    assert all(DEFAULT.of(seen) is row for seen in facts)
    assert ("KeyError" in says(row)) == (DEFAULT.of(Observation(error="KeyError: 'x'", is_failure=True)) is row)


OWN = '[[cause]]\nfault = "ours"\nerror = "LicenseError"\nclass = "network"\nstrategy = "wait"\n'


def test_output_as_json_and_text_starts_with_a_jobs_own_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.toml").write_text(OWN)
    monkeypatch.setenv("CAUSE_TABLE", str(tmp_path / "own.toml"))
    assert main(["explain", "causes", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows[0]["fault"] == "ours" and rows[0]["class"] == "network" and len(rows) == len(TABLE) + 1
    assert main(["explain", "causes"]) == 0
    assert capsys.readouterr().out.startswith("ours: network; tried again: forever; wait\n")
    for option in ("--markdown", "--zh"):
        assert main(["explain", "causes", option]) == 0
        assert "ours" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("make", "says_"),
    [
        (lambda path: None, "No such file or directory. Fix: correct the path, or unset CAUSE_TABLE"),
        (lambda path: path.mkdir(), "Fix: correct the path, or unset CAUSE_TABLE"),
        (lambda path: path.symlink_to("/dev/zero"), "not a plain file"),
        (lambda path: path.write_bytes(b"\xff\xfe"), "not UTF-8. Fix: save it as UTF-8"),
        (lambda path: path.write_bytes(b"#" * 70_000), "more than 65536 bytes"),
        (lambda path: path.write_text("\n[[cause]]\nclass = 'x'\n"), "line 2: a row without a condition"),
    ],
)
def test_unusable_file_is_one_sentence(make: object, says_: str, tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    make(path)  # type: ignore[operator]
    with pytest.raises(SettingsError) as caught:
        table_of(settings_in(tmp_path, CAUSE_TABLE=str(path)))
    assert str(caught.value).startswith(f"CAUSE_TABLE={path}") and says_ in str(caught.value)
