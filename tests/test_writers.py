"""Every place in the package that opens a file to write, found in the sources.

In a folder that others may write, a name can be a link to a file of this user's. So files are made by ``store.durable``
(O_EXCL, O_NOFOLLOW, 0600) and appended to by ``store.private`` (O_NOFOLLOW, the owner is checked). Any other code that
opens one is in the list below, with the reason why no other user can have planted its name.
"""

from __future__ import annotations

import ast
import itertools
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from samebits.__main__ import main
from samebits.store import durable
from samebits.store.probe_note import ProbeNote, ProbeState
from samebits.store.process_identity import ProcessIdentity
from tests.training.checkpoint.test_export import save
from tests.training.commits import small_state

NOBODY = 65534
PACKAGE = Path(__file__).resolve().parents[1] / "runtime" / "samebits"

WRITERS = {
    "store/durable.py:create": "the helper: O_EXCL and O_NOFOLLOW",
    "store/durable.py:reopen": "the helper for a file that is there: O_NOFOLLOW, creates nothing",
    "store/durable.py:_link_or_rename": "gives a file of ours its name, and never one that is taken",
    "store/private.py:_open": "the helper that appends: O_NOFOLLOW, and the owner is checked",
    "store/checkpoint/memory_buffer.py:reserve": "O_EXCL and O_NOFOLLOW in a folder checked to be 0700",
    "store/checkpoint/memory_buffer.py:open_slot": "O_NOFOLLOW in that folder; creates nothing",
    "training/checkpoint/kept_generators.py:_new_file": "O_EXCL and O_NOFOLLOW in that folder",
    "store/checkpoint/writing.py:write_files": "a second name for a point of this rank's, in a new 0700 folder",
    "store/checkpoint/object_store.py:_upload": "an object of a store, no file of this machine",
    "store/process_identity.py:find_memory": "memory of a process of this user's, by its descriptor under /proc",
    "service/process_state.py:__init__": "memory of a process of this user's, by its descriptor under /proc",
    "training/process/context.py:_record_for_torchrun": "torchrun's error file, which torch has just written",
    "commands/doctor.py:folder": "a new folder of its own, removed at once",
    "integrations/ray_train.py:copy": "a checkpoint's files into a folder of this job's",
    "ray.py:to_directory": "a checkpoint's files into the folder that the caller names",
    "training/checkpoint/export.py:export_for_torch": "into a descriptor of store.durable's",
    "commands/drill/faults.py:flip_bit": "a drill damages a checkpoint that it made, on purpose",
    "commands/drill/inside.py:_write": "copied into the drill's own 0700 folder; has the standard library alone",
    "commands/drill/faults.py:_made": "the kernel's files of a cgroup",
    "commands/run/check.py:main": "a new folder, 0700, under an unpredictable name (mkdtemp)",
}
"""By file and function: why it may open a file to write."""

WRITING_FLAGS = {"O_WRONLY", "O_RDWR", "O_CREAT", "O_TRUNC", "O_APPEND", "O_TMPFILE"}
MAKING = {
    *("write_text", "write_bytes", "touch", "symlink_to", "hardlink_to", "mkfifo", "mknod", "link", "symlink"),
    *("mkstemp", "mkdtemp", "NamedTemporaryFile", "TemporaryFile", "TemporaryDirectory", "SpooledTemporaryFile"),
    *("copy", "copy2", "copyfile", "copytree", "move", "make_archive", "save", "save_file", "FileHandler", "savez"),
}
OF_MODULES = {"copy", "copy2", "move", "save", "link", "symlink", "savez"}
"""Names that are also methods of other things; they count if a module that makes files has them."""
FILE_MODULES = {"os", "shutil", "torch", "numpy", "np"}


def writers_in(source: str, file: str) -> Iterator[tuple[str, int]]:
    """Yield ``file:function`` and line of each call that opens a file to write, or may because its mode is variable."""

    def visit(node: ast.AST, function: str) -> Iterator[tuple[str, int]]:
        for child in ast.iter_child_nodes(node):
            inside = child.name if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else function
            if isinstance(child, ast.Call) and writes(child):
                yield f"{file}:{function}", child.lineno
            yield from visit(child, inside)

    yield from visit(ast.parse(source), "<module>")


def writes(call: ast.Call) -> bool:
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    of = function.value.id if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) else ""
    if name == "open" and of == "os":
        return ast.unparse(call.args[0]) != "os.devnull" and _writes_by_flags(call.args[1])
    if name == "open" and of in ("Journal", "StepLogWriter"):
        return False  # constructors of ours
    if name == "open":
        modes = [one.value for one in call.keywords if one.arg == "mode"]
        given = call.args if isinstance(function, ast.Attribute) and of != "io" else call.args[1:]
        modes += [one for one in given if not isinstance(one, ast.Constant) or isinstance(one.value, str)]
        return any(not isinstance(one, ast.Constant | ast.JoinedStr) or _is_writing_mode(one) for one in modes)
    return name in MAKING and (name not in OF_MODULES or of in FILE_MODULES)


def _is_writing_mode(mode: ast.expr) -> bool:
    text = mode.value if isinstance(mode, ast.Constant) and isinstance(mode.value, str) else ""
    return set(text) <= set("rwaxbt+") and bool(set(text) & set("wax+"))


def _writes_by_flags(flags: ast.expr) -> bool:
    names = {one.attr for one in ast.walk(flags) if isinstance(one, ast.Attribute)}
    return bool(names & WRITING_FLAGS) or any(isinstance(one, ast.Name) and one.id != "os" for one in ast.walk(flags))


def test_every_writer_is_a_helper_or_has_a_reason() -> None:
    found = {}
    for path in sorted(set(PACKAGE.rglob("*.py")) - set((PACKAGE / "core").rglob("*.py"))):  # core does no I/O at all
        file = path.relative_to(PACKAGE).as_posix()
        found.update({who: f"{file}:{line}" for who, line in writers_in(path.read_text(), file)})
    assert {where for who, where in found.items() if who not in WRITERS} == set()
    assert WRITERS.keys() - found.keys() == set(), "nothing opens a file there any more: remove the line"


@pytest.mark.parametrize(
    "line",
    [
        "open(path, 'w')",
        "open(path, mode='ab')",
        "open(path, mode)",
        "path.open('r+b')",
        "Path(name).open('x')",
        "path.write_text('')",
        "path.write_bytes(b'')",
        "os.open(path, os.O_WRONLY | os.O_CREAT)",
        "os.open(path, os.O_RDWR)",
        "os.open(path, flags)",
        "tempfile.mkstemp()",
        "torch.save(content, path)",
        "shutil.copyfile(one, other)",
        "shutil.move(one, other)",
        "os.link(one, other)",
        "logging.FileHandler(path)",
    ],
)
def test_writing_line_is_found(line: str) -> None:
    assert list(writers_in(f"def made():\n    {line}\n", "some.py")) == [("some.py:made", 2)]


@pytest.mark.parametrize(
    "line",
    ["open(path)", "path.open('rb')", "os.open(path, os.O_RDONLY | os.O_CLOEXEC)", "state.copy()", "slot.open()"],
)
def test_reading_line_is_not(line: str) -> None:
    assert list(writers_in(f"def read():\n    {line}\n", "some.py")) == []


# ---- the attack: links under the names that a temporary file is about to have


def as_another_user(do: Callable[[], object], folder: Path) -> None:
    """Do it in ``folder``, in a process of another user if this one is root's; otherwise as this user."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.chdir(folder)
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            do()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recovery").mkdir(mode=0o700)
    line = '{"kind":"job","at":1.0,"term":1,"text":"digits","job":"1"}\n'
    durable.write_file_atomically(tmp_path / "recovery" / "events.jsonl", line.encode())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RECOVERY_PATH", str(tmp_path / "recovery"))
    save(tmp_path / "ckpt", small_state().contents())


EXPORT = ("ckpt", "export", "0/7", "--folder", "ckpt", "{}")
OUTPUTS: dict[str, Callable[[Path], object]] = {
    "PROBE_FILE": lambda path: ProbeNote(ProcessIdentity(7, 42), ProbeState.READY, 1.0).write(path),
    "report": lambda path: main(["history", "--html", str(path)]),
    "report, replaced": lambda path: (main(["history", "--html", str(path)]), main(["history", "--html", str(path)])),
    "export, torch's": lambda path: main([one.format(path) for one in EXPORT]),
    "export, replaced": lambda path: (path.touch(), main([*(one.format(path) for one in EXPORT), "--force"])),
    "export, safetensors": lambda path: main([*(one.format(path) for one in EXPORT), "--format", "safetensors"]),
    "export, a directory": lambda path: main([*(one.format(path) for one in EXPORT), "--format", "dcp"]),
    "a new file": lambda path: durable.create_file_atomically(path, b"new"),
    "a file of the job's": lambda path: durable.write_file_atomically(path, b"new"),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", OUTPUTS)
def test_temporary_file_follows_no_planted_link(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_job(tmp_path, monkeypatch)
    victim, elsewhere, shared = tmp_path / "victim", tmp_path / "elsewhere", tmp_path / "shared"
    victim.write_text("mine alone")
    victim.chmod(0o600)
    elsewhere.mkdir(mode=0o700)
    shared.mkdir()
    shared.chmod(0o1777)
    # The names that this process takes, and those of the previous release.
    monkeypatch.setattr(durable, "_temporary_numbers", itertools.count())
    planted = [f".out.tmp-{os.getpid()}-{number}" for number in range(64)]
    partial = f".out.{os.getpid()}.partial"

    def plant() -> None:
        for one in planted:
            Path(one).symlink_to(victim)
        Path(partial).symlink_to(elsewhere)

    as_another_user(plant, shared)
    OUTPUTS[name](shared / "out")
    assert victim.read_text() == "mine alone"
    assert [*elsewhere.iterdir()] == []
    made = (shared / "out").lstat()
    assert not stat.S_ISLNK(made.st_mode) and made.st_uid == os.geteuid()
    assert stat.S_IMODE(made.st_mode) & 0o077 == 0, "the content is its writer's alone"
    assert {one.name for one in shared.iterdir()} == {"out", partial, *planted}
