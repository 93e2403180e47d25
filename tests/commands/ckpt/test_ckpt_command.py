"""``ckpt ls|verify|show|export`` on folders with any content, without changing it."""

from __future__ import annotations

import copy
import io
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from safetensors import safe_open

from samebits.__main__ import main
from samebits.commands.ckpt import verifying
from samebits.commands.ckpt.verifying import ReadProgress
from samebits.errors import CheckpointError
from samebits.store import checkpoint as checkpoints
from samebits.store.checkpoint import FoundPoint, TensorPart, rank_directory, read, write_point
from samebits.store.checkpoint.folder import move_damaged_aside, temporary_directory
from samebits.store.lock import DirectoryLock
from samebits.store.owner import claim_folder
from tests.store.forging import STATE, changes, fields_of, forge
from tests.store.points import CHUNK_BYTES, JOB, LAYOUT, TREE, change_byte, find, header_of, one_of_each_dtype, save

DAMAGED, USAGE = 74, 80
DATA, MANIFEST = "data.safetensors", "manifest.msgpack"
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return checkpoints of four ranks with a point of step 10 each; three have one of step 20 as well."""
    folder = tmp_path / "ckpt_of_rank"
    for rank in range(4):
        save(folder, 10, rank=rank)
        claim_folder(rank_directory(folder, rank), JOB, "train.py")
    for rank in range(3):
        save(folder, 20, rank=rank)
    return folder


def run(root: Path, word: str, *arguments: str) -> int:
    return main(["ckpt", word, *arguments, "--folder", str(root)])


def content_of(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in sorted(folder.rglob("*"))
    }


def flip(root: Path, step: int, rank: int, position: int = -5) -> Path:
    path = find(root, step, rank=rank).path / DATA
    change_byte(path, position)
    return path


# --- ls ---------------------------------------------------------------------------------------------------------------


def listed(root: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    assert run(root, "ls", "--json") == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_ls_lists_every_rank_newest_first_and_the_common_point(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(root, "ls") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["slot", "step", "generation", "rank", "size", "age", "state"]
    assert [line.split()[:2] for line in lines[1:8]] == [
        *(["0", "20"], ["0", "10"], ["1", "20"], ["1", "10"], ["2", "20"], ["2", "10"], ["3", "10"])
    ]
    assert all("of 4" in line and line.endswith("whole") for line in lines[1:8])
    assert "7 whole points" in lines[8]
    assert lines[9] == "the newest that all 4 ranks hold: step 10 of generation 1"
    save(root, 20, rank=3)
    assert listed(root, capsys)["newest_common"] == {"step": 20, "generation": 1, "world_size": 4}


def test_ls_says_which_points_are_unusable_and_why(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = rank_directory(root, 0)
    (find(root, 20, rank=0).path / MANIFEST).write_bytes(b"torn")
    move_damaged_aside(find(root, 10, rank=0).path)
    temporary_directory(directory, "step_0000000030_gen_000001").mkdir()
    (directory / ".tmp-4194304-1-0-step_0000000040_gen_000001").mkdir()
    (directory / "somebody's notes").mkdir()
    points = [one for one in listed(root, capsys)["points"] if one["slot"] == 0]  # type: ignore[attr-defined]
    assert [(one["step"], one["state"]) for one in points] == [
        (40, "left half written"),
        (30, "being written"),
        (20, "damaged"),
        (10, "moved aside"),
    ]
    assert "its hash differs (4 bytes)" in points[2]["why"]
    assert f"by pid {os.getpid()}" in points[1]["why"]
    assert run(root, "ls") == 0
    text = capsys.readouterr().out
    assert "damaged: the manifest has changed" in text
    assert "1 damaged" in text and "1 moved aside" in text


def test_ls_recognises_a_point_of_another_job_or_slot(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = save(root, 30, rank=0, job="another")
    shutil.copytree(find(root, 20, rank=1).path, rank_directory(root, 3) / find(root, 20, rank=1).path.name)
    points = listed(root, capsys)["points"]
    wrong = {(one["slot"], one["step"]): one["why"] for one in points if one["state"] == "damaged"}  # type: ignore[attr-defined]
    assert wrong.keys() == {(0, 30), (3, 20)}
    assert "was saved by job another" in wrong[0, 30] and str(other.path) in wrong[0, 30]
    assert "its manifest names slot 1" in wrong[3, 20]


def test_ls_of_a_folder_with_an_unreadable_owner(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (rank_directory(root, 0) / "owner.json").write_text("{")
    assert "7 whole points" in (run(root, "ls"), capsys.readouterr().out)[1]


def test_ls_of_an_empty_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path / "gone", "ls") == USAGE
    assert "--folder names a job's checkpoint folder" in capsys.readouterr().err
    assert run(tmp_path, "ls") == 0
    assert f"no points in {tmp_path}" in capsys.readouterr().out


def test_ls_finds_the_current_jobs_folder_and_its_prefixes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "points" / "big", 10)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CHECKPOINT_PATH", "points")
    assert main(["ckpt", "ls"]) == 0
    assert f"look into {tmp_path / 'points' / 'big'} with --folder" in capsys.readouterr().out
    assert main(["ckpt", "ls", "--folder", "points/big"]) == 0
    assert "1 whole point;" in capsys.readouterr().out


# --- verify -----------------------------------------------------------------------------------------------------------


def test_verify_returns_0_only_if_every_byte_is_right(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(root, "verify") == 0
    assert capsys.readouterr().out.startswith("7 of 7 points whole; ")
    path = flip(root, 20, rank=1)
    (find(root, 10, rank=2).path / DATA).write_bytes(b"short")
    assert run(root, "verify") == DAMAGED == CheckpointError.exit_code
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[0].startswith(f"damaged: {path}: chunk 2 of 3 (bytes ")
    assert "kept for inspection" in lines[0]
    assert f"{find(root, 10, rank=2).path}: {DATA} has 5 bytes" in lines[1]
    assert "nothing is to be deleted" in lines[1]
    assert lines[2].startswith("5 of 7 points whole; ")


def test_verify_finds_every_flipped_byte_of_a_data_file(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = find(root, 20, rank=0).path / DATA
    for position in range(0, path.stat().st_size, 7):
        change_byte(path, position)
        assert run(root, "verify", "0/20") == DAMAGED
        assert str(path) in capsys.readouterr().out
        change_byte(path, position)
    assert run(root, "verify", "0/20") == 0


def test_verify_of_named_points(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(root, 20, rank=1)
    save(root, 20, 2, rank=1)
    assert run(root, "verify", "0/20", "0/10", "0/10") == 0
    assert "2 of 2 points" in capsys.readouterr().out
    assert run(root, "verify", "1/20") == DAMAGED, "a step means all its generations"
    assert "1 of 2 points" in capsys.readouterr().out
    assert run(root, "verify", str(find(root, 20, 2, rank=1).path)) == 0
    assert run(root, "verify", str(find(root, 20, 1, rank=1).path)) == DAMAGED


def test_verify_of_a_moved_point_and_of_one_without_a_manifest(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "kept"
    shutil.copytree(find(root, 20, rank=1).path, copy)
    assert run(root, "verify", str(copy)) == 0
    (copy / MANIFEST).unlink()
    capsys.readouterr()
    assert run(root, "verify", str(copy), "0/10") == DAMAGED
    out = capsys.readouterr().out
    assert str(copy / MANIFEST) in out and "1 of 2 points whole" in out


@pytest.mark.parametrize("name", ["0/30", "9/10", "nowhere", "0/10/1"])
def test_missing_point_is_answered_with_the_existing_ones(
    root: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["verify", name], ["show", name], ["export", name, "x.safetensors"]):
        assert run(root, *words) == USAGE
        told = capsys.readouterr().err
        expected = {"0/30": "slot 0 has those of step 20, 10", "9/10": "slots with a folder are 0, 1, 2, 3"}
        assert expected.get(name, "is neither SLOT/STEP (such as 0/120) nor a directory") in told


def test_nothing_to_verify_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "verify") == USAGE
    assert "no points in" in capsys.readouterr().err


def test_point_deleted_by_its_writer_meanwhile_is_not_damaged(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    oldest = find(root, 10, rank=0).path

    def let_go_then_verify(found: checkpoints.FoundPoint, on_bytes: object = None) -> None:
        if found.path == oldest:
            shutil.rmtree(oldest)
        original(found)

    original = checkpoints.verify
    monkeypatch.setattr(verifying.checkpoints, "verify", let_go_then_verify)
    assert run(root, "verify") == 0
    assert "6 of 6 points whole" in (out := capsys.readouterr().out)
    assert "1 removed by their writers meanwhile" in out


@pytest.mark.parametrize("times", [verifying.LOOKS - 1, verifying.LOOKS])
def test_listing_is_repeated_if_all_listed_points_are_gone(
    times: int, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The job saves more often than this machine can read."""
    listings: list[object] = []

    def gone(found: checkpoints.FoundPoint) -> bool:
        return len(listings) <= times

    def verify(found: checkpoints.FoundPoint, on_bytes: object = None) -> None:
        if gone(found):
            raise CheckpointError("no such file")
        original(found)

    def listed(folder: verifying.Folder) -> list[checkpoints.FoundPoint]:
        listings.append(folder)
        return every(folder)

    original, every = checkpoints.verify, verifying.Folder.all
    monkeypatch.setattr(verifying.checkpoints, "verify", verify)
    monkeypatch.setattr(verifying.checkpoints, "is_gone", gone)
    monkeypatch.setattr(verifying.Folder, "all", listed)
    assert run(root, "verify") == (0 if times < verifying.LOOKS else USAGE)
    told = capsys.readouterr()
    assert ("7 of 7 points whole" in told.out) is (times < verifying.LOOKS)
    assert ("were removed by their writers before they were read" in told.err) is (times == verifying.LOOKS)


def test_points_set_aside_are_reported_but_not_counted(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    move_damaged_aside(find(root, 10, rank=0).path)
    assert run(root, "verify") == 0
    assert "1 damaged point that was moved aside earlier not counted" in capsys.readouterr().out


@pytest.mark.parametrize("is_terminal", [False, True])
def test_long_reading_reports_progress_and_speed(is_terminal: bool) -> None:
    class Out(io.StringIO):
        def isatty(self) -> bool:
            return is_terminal

    now_s, out = [100.0], Out()
    progress = ReadProgress(8 << 30, "verifying", out=out, clock=lambda: now_s[0])
    progress.add(1 << 20)
    assert out.getvalue() == "", "short work reports nothing"
    for _ in range(2):
        now_s[0] += 10.0
        progress.add(2 << 30)
    progress.clear()
    begin, end = ("\r", "") if is_terminal else ("", "\n")
    assert out.getvalue().startswith(
        f"{begin}verifying: 2.0 GiB of 8.0 GiB, 0.20 GiB/s, about 30 s left{end}{begin}verifying: 4.0 GiB of 8.0 GiB"
    )
    assert progress.speed_text() == "0.20 GiB/s"


# --- show -------------------------------------------------------------------------------------------------------------


def test_show_prints_tensors_and_plain_values(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(root, "show", "1/20") == 0
    text = capsys.readouterr().out
    assert text.startswith(f"step 20 of generation 1: rank 1 of 4, slot 1, node 1, job {JOB}\n")
    assert "weight  F32    (8, 3)  96" in text
    assert "state.betas = (0.9, 0.999)" in text
    assert f"state.seed = {2**100}" in text
    assert "layout.rebuilt = False" in text


def test_show_as_json_loses_nothing(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(root, "show", "1/20", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["step"], shown["rank"], shown["world_size"], shown["job"]) == (20, 1, 4, JOB)
    assert {"name": "bias", "dtype": "BF16", "shape": [3], "bytes": 6} in shown["tensors"]
    tree = {key["$bytes"] if isinstance(key, dict) else key: value for key, value in shown["tree"]["$dict"]}
    assert tree["betas"] == {"$tuple": [0.9, 0.999]}
    assert tree["names"] == ["a", {"$bytes": "00"}]
    assert tree[3] is True
    assert shown["layout"] == LAYOUT


def test_show_uses_the_newest_usable_generation(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    newer = save(root, 20, 2, rank=1)
    assert run(root, "show", "1/20") == 0
    assert capsys.readouterr().out.startswith("step 20 of generation 2")
    (newer.path / MANIFEST).unlink()
    assert run(root, "show", "1/20") == 0
    assert capsys.readouterr().out.startswith("step 20 of generation 1")


def test_show_of_a_changed_header_is_refused(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(root, 20, rank=1, position=12)
    assert run(root, "show", "1/20") == DAMAGED
    assert "chunk 0 of 3" in capsys.readouterr().err


# --- export -----------------------------------------------------------------------------------------------------------


def test_export_is_a_plain_safetensors_file_with_every_byte(root: Path, tmp_path: Path) -> None:
    write_point(root, header_of(30), one_of_each_dtype(), TREE, LAYOUT, chunk_bytes=100)
    found, file = find(root, 30), tmp_path / "out.safetensors"
    assert run(root, "export", "0/30", str(file)) == 0
    expected = read(found).tensors
    with safe_open(file, "numpy") as opened:
        assert set(opened.keys()) == set(expected)
        metadata = opened.metadata()
    assert (metadata["step"], metadata["rank"], metadata["format"]) == ("30", "0", "pt")
    assert json.loads(metadata["layout"]) == LAYOUT
    assert dict(json.loads(metadata["tree"])["$dict"][:1]) == {"lr": 0.1}
    data = file.read_bytes()
    header_bytes = 8 + int.from_bytes(data[:8], "little")
    entries = json.loads(data[8:header_bytes])
    for name, part in expected.items():
        first, last = entries[name]["data_offsets"]
        assert data[header_bytes + first : header_bytes + last] == bytes(part.data), name


def test_export_of_a_point_without_tensors(root: Path, tmp_path: Path) -> None:
    write_point(root, header_of(30), [], TREE, LAYOUT)
    assert run(root, "export", "0/30", str(tmp_path / "out.safetensors")) == 0
    with safe_open(tmp_path / "out.safetensors", "numpy") as opened:
        assert list(opened.keys()) == []


def test_existing_file_is_kept_unless_forced(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.safetensors"
    file.write_text("precious")
    assert run(root, "export", "0/20", str(file)) == USAGE
    assert "or pass --force" in capsys.readouterr().err
    assert file.read_text() == "precious"
    assert run(root, "export", "0/20", str(file), "--force") == 0
    assert len(file.read_bytes()) > 96


@pytest.mark.parametrize("word", [[], ["--format", "torch"]])
def test_damaged_point_is_not_exported_and_an_existing_file_stays(
    root: Path, tmp_path: Path, word: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    flip(root, 20, rank=1)
    file = tmp_path / "out.safetensors"
    assert run(root, "export", "1/20", str(file), *word) == DAMAGED
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt_of_rank"]
    file.write_text("precious")
    assert run(root, "export", "1/20", str(file), "--force", *word) == DAMAGED
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt_of_rank", "out.safetensors"]
    assert file.read_text() == "precious"
    assert "chunk 2 of 3" in capsys.readouterr().err


def test_export_into_the_checkpoint_folder_or_a_missing_one_is_refused(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = content_of(root)
    (tmp_path / "link").symlink_to(root)
    for place in (root / "x", root / "0" / "x", tmp_path / "link" / "x", find(root, 20).path / DATA):
        assert run(root, "export", "0/20", str(place), "--force") == USAGE
        assert "which only the job may write" in capsys.readouterr().err
    assert run(root, "export", "0/20", str(tmp_path / "no" / "x")) == USAGE
    assert run(root, "export", "0/20", str(tmp_path)) == USAGE
    assert content_of(root) == before


# --- all commands -----------------------------------------------------------------------------------------------------


def test_commands_change_nothing_take_no_lock_and_load_no_torch(root: Path, tmp_path: Path) -> None:
    lock = DirectoryLock(rank_directory(root, 0), "worker 0")
    lock.acquire(0.0)
    before = content_of(root)
    words = [["ls"], ["verify"], ["show", "0/20"], ["export", "0/20", str(tmp_path / "out.safetensors")]]
    program = (
        "import json, sys\n"
        "from samebits.__main__ import main\n"
        "done = [main(['ckpt', *words, '--folder', sys.argv[1]]) for words in json.loads(sys.argv[2])]\n"
        "print(done, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(root), json.dumps(words)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "[0, 0, 0, 0] False"
    assert content_of(root) == before
    lock.release()


@pytest.mark.parametrize("word", ["ls", "verify", "show", "export"])
def test_every_subcommand_has_help(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["ckpt", word, "--help"])
    assert ended.value.code == 0
    assert "--folder" in capsys.readouterr().out


# --- forged points ----------------------------------------------------------------------------------------------------

WORDS: list[tuple[str, ...]] = [
    ("ls",),
    ("ls", "--json"),
    ("verify",),
    ("show", "0/10"),
    ("show", "0/10", "--json"),
    ("export", "0/10", "{out}"),
    ("export", "0/10", "{out}.pt"),
    ("export", "0/10", "{out}", "--format", "dcp"),
]


@pytest.fixture
def forged(tmp_path: Path) -> FoundPoint:
    """Return a complete point of a state, to be forged."""
    root = tmp_path / "ckpt_of_rank"
    tensors = [TensorPart("weight", "F32", (8, 3), bytes(96))]
    write_point(root, header_of(10), tensors, STATE, {}, chunk_bytes=CHUNK_BYTES)
    claim_folder(rank_directory(root, 0), JOB, "train.py")
    return find(root, 10)


@pytest.mark.parametrize("word", WORDS, ids=" ".join)
def test_every_forged_manifest_is_reported_in_one_sentence(
    forged: FoundPoint, tmp_path: Path, capsys: pytest.CaptureFixture[str], word: tuple[str, ...]
) -> None:
    root, whole = forged.path.parent.parent, fields_of(forged)
    endings = Counter[int]()
    for number, (name, change) in enumerate(changes(whole)):
        fields = copy.deepcopy(whole)
        change(fields)
        try:
            forge(forged, fields)
        except CheckpointError:
            continue  # no such manifest can be written
        try:
            status = run(root, word[0], *(one.format(out=tmp_path / f"out{number}") for one in word[1:]))
        except Exception as error:
            pytest.fail(f"{name}: {error!r}")
        told = capsys.readouterr()
        assert status in (0, DAMAGED, USAGE), f"{name}: {told.err}"
        assert "Traceback" not in told.err and told.err.count("\n") <= 2, f"{name}: {told.err}"
        endings[status] += 1
    assert endings[0] and (endings[DAMAGED] or word[0] == "ls"), endings


@pytest.mark.parametrize("word", WORDS[2:], ids=" ".join)
def test_forged_size_beyond_memory_allocates_nothing(
    forged: FoundPoint, tmp_path: Path, capsys: pytest.CaptureFixture[str], word: tuple[str, ...]
) -> None:
    """A sparse file of 4 TiB, in one chunk with an unverified hash, and in many."""
    size = 4 << 40
    os.truncate(forged.path / DATA, size)
    for chunk_bytes in (size, 1 << 26):
        digests = [bytes(16)] * -(-size // chunk_bytes)
        forge(forged, fields_of(forged) | {"data_bytes": size, "chunk_bytes": chunk_bytes, "chunks": digests})
        words = [one.format(out=tmp_path / "out") for one in word]
        assert run(forged.path.parent.parent, *words) == DAMAGED, "".join(capsys.readouterr())
