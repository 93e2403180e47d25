"""The layers of the package and their permitted imports, read from the sources.

Every file of ``samebits`` is parsed, never imported, so an import inside a function counts as much as one at the top.
The rules are the tables below; :func:`breaches` applies them to one source, and the small offending sources further
down show that each rule can fail. The last test covers what parsing cannot see: it imports the scheduler's path in a
process of its own and checks whether torch was loaded.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "runtime" / "samebits"

MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "errors": (),
    "printable": (),
    "named_file": (),
    "strict_json": (),
    "urls": (),
    "spelling": (),
    "option_types": (),
    "exit_codes": ("doc_tables",),
    "doc_tables": (),
    "tracebacks": (),
    "start_folder": (),
    "scheduler_hosts": (),
    "etcd_place": ("scheduler_hosts", "urls"),
    "settings_table": ("doc_tables", "etcd_place", "scheduler_hosts", "urls"),
    "config": ("etcd_place", "scheduler_hosts", "settings_table", "spelling", "urls"),
    "core": ("core",),
    "store": ("spelling", "core", "etcd_place", "store", "urls"),
    "net": ("core", "net", "scheduler_hosts"),
    "account": ("core", "store", "account"),
    "service": ("spelling", "core", "scheduler_hosts", "store", "net", "config", "account", "service"),
    # From the core, training uses only types and predicates, since the scheduler and the agent decide; the state of a
    # work queue is the exception.
    "training": (
        *(
            "core.agent.agent_events",
            "core.watch.anomalies",
            "core.watch.audits",
            "core.replacement_names",
            "core.messages",
            "core.watch.node_check",
            "core.watch.stragglers",
            "core.point",
            "core.ready",
            "core.records",
            "core.reports",
            "core.values",
            "core.state",
            "core.keys.queue_state",
        ),
        *("spelling", "start_folder", "store", "config", "service", "training", "tracebacks", "urls"),
    ),
    # These read the core's types and the record of the job; decisions stay with the scheduler.
    "launcher": (
        *(
            "core.causes.restarts",
            "core.causes.table",
            "core.end_kinds",
            "core.hangs",
            "core.replacement_names",
            "core.messages",
            "core.point",
        ),
        *("service.cause_file", "service.fork_orders", "service.job_journal", "service.log", "service.process_state"),
        *("service.scheduler_address", "service.stacks", "service.status"),
        *("account", "config", "earlier", "launcher", "net", "scheduler_hosts", "spelling", "store", "tracebacks"),
    ),
    "hosts": (
        *("core.causes.restarts", "core.replacement_names", "core.messages"),
        *("account", "config", "hosts", "launcher", "option_types", "store"),
    ),
    "commands": (
        *("core.causes.escalation", "core.causes.table", "core.end_kinds", "core.hangs", "core.replacement_names"),
        *("service.cause_file", "service.job_journal", "service.log", "service.scheduler_address", "service.stacks"),
        "service.status",
        *("account", "commands", "config", "doc_tables", "exit_codes", "hosts", "launcher", "net", "option_types"),
        *("scheduler_hosts", "spelling", "store", "tracebacks", "training"),
    ),
    # Shows a job and decides nothing about it.
    "dashboard": (
        "service.status",
        *("account", "commands", "config", "dashboard", "launcher", "net", "option_types", "spelling", "store"),
    ),
    # Names that other frameworks' users look for, each over an existing part.
    "compat": (
        *(
            "core.watch.equality",
            "core.watch.health_limits",
            "core.keys.key_store",
            "core.messages",
            "core.point",
            "core.reports",
        ),
        *("store", "service", "training", "compat", "integrations.epochs"),
    ),
    "__init__": ("config", "service", "start_folder", "training", "compat"),
    "earlier": (),
    "horovod": ("horovod", "store.checkpoint", "training"),
    "ray": ("config", "hosts", "integrations", "store"),
    "torchx": (),
    # With the one part of the launcher with which torchrun's agents keep their job's scheduler running.
    "integrations": (
        *("core.messages", "core.point", "core.reports", "launcher.kept_scheduler"),
        *("config", "integrations", "service", "start_folder", "store", "tracebacks", "training"),
    ),
    "__main__": (
        "__version__",
        "commands",
        "config",
        "dashboard",
        "net",
        "option_types",
        "service",
        "spelling",
        "store",
    ),
}
"""What each package may import besides ``errors``, ``named_file``, ``printable`` and ``strict_json``, which all may."""

ONLY_INSIDE_FUNCTIONS: dict[str, tuple[str, ...]] = {
    "__init__": ("config", "service", "training", "compat"),
    "compat": ("integrations", "training"),
    "integrations/torchrun.py": ("integrations", "launcher"),
    "ray": ("hosts", "integrations"),
    "commands": ("training",),
}
"""Imports of a package or file that must wait until a call, so that a process without training never loads torch."""

PURE = {
    *("account/events.py", "account/goodput.py", "account/recoveries.py", "account/spans.py"),
    *("hosts/autoscale.py", "hosts/host_list.py", "hosts/placement.py"),
}
"""Decisions and sums outside ``core``, which keep to its rules about the world outside ``samebits``."""

FLOORS: dict[str, tuple[tuple[str, ...], ...]] = {
    "core": (
        ("end_kinds", "hangs", "replacement_names", "values"),
        ("point",),
        ("reports",),
        ("messages",),
        ("causes", "keys", "records"),
        ("ready", "state"),
        ("agent", "ledger", "restore"),
        ("membership",),
        ("watch",),
        ("rounds",),
        ("job_end",),
        ("scheduler",),
    ),
    "training": (
        ("fsdp2_private", "main_thread_time", "torch_private", "value_trees"),
        ("group",),
        ("process", "sharding"),
        ("state",),
        ("checkpoint",),
        ("run",),
        ("elastic",),
        ("zygote",),
    ),
    "store.checkpoint": (
        ("tree",),
        ("point_format",),
        ("folder", "object_store"),
        ("reading",),
        ("pruning", "streaming", "writing"),
        ("remote_points",),
        ("point_store",),
        ("memory_buffer",),
        ("memory_room",),
        ("copied_buffer",),
        ("writer",),
        ("writer_process",),
    ),
}
"""Layers inside these packages, from the lowest: a part imports only from itself and from lower layers."""

TORCH = {"torch", "torch_npu", "torchvision", "functorch"}
TORCH_ROOMS = ("training", "integrations", "horovod")
"""The packages that import torch: the training, and what a script imports in place of another framework."""
TORCHRUN_ENTRY = "integrations/torchrun.py"
"""torch imports this module in every process that imports torch's elastic package."""
PICKLE = {"pickle", "_pickle", "pickletools", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
PICKLING_CALLS = {
    *("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"),
    *("recv_object_list", "send_object_list", "recv_pyobj", "send_pyobj"),
}
UNPICKLING_CALLS = {"torch.load", "torch.save", "pickle.load", "pickle.loads", "pickle.dump", "pickle.dumps"}
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
CORE_MAY_IMPORT = {
    *(
        "__future__",
        "abc",
        "bisect",
        "collections",
        "contextlib",
        "copy",
        "dataclasses",
        "enum",
        "functools",
        "hashlib",
    ),
    *("heapq", "hmac", "ipaddress", "itertools", "math", "operator", "re"),
    *("statistics", "string", "struct", "types", "typing"),
    "msgspec",  # encoding of values: messages and records are its structs
}
"""The only external modules that a decision may depend on: no I/O, clock, randomness, thread or log."""
CORE_MAY_NOT_CALL = {"open", "print", "input", "exec", "eval", "breakpoint"}
SAVES_FOR_OTHER_PROGRAMS = "training/checkpoint/export.py"
"""Only this may call ``torch.save``: for readers with torch. Nothing of ours reads such a file."""
WRITES_FOR_TORCHS_TOOL = "commands/stack.py"
"""Only this may call ``pickle.dumps``: for torch's analyser of collectives. Nothing of ours reads such a file."""
READS_OTHERS_INDEX = "training/checkpoint/dcp_index.py"
"""Only this may subclass ``pickle``'s unpickler and call ``torch.load`` (``weights_only``): for a format of torch's."""
NAMES_THAT_SAY_NOTHING = {"util", "utils", "helper", "helpers", "common", "misc"}
FEWEST_WORDS_OF_AN_OPENING = 8


class When(Enum):
    """When an import happens."""

    LOADING = "when the module is loaded"
    CALLED = "when a function is called"
    TYPING = "for the type checker only"


@dataclass(frozen=True, slots=True)
class Import:
    """One imported name, resolved to its absolute dotted path."""

    target: str
    line: int
    when: When


class Imports(ast.NodeVisitor):
    """Collects every import of one module, relative ones resolved, ``import_module("...")`` included."""

    def __init__(self, package: list[str]) -> None:
        self.package = package
        self.found: list[Import] = []
        self.computed: list[int] = []
        self._when = When.LOADING

    def _inside(self, when: When, nodes: list[ast.stmt] | list[ast.AST]) -> None:
        outer, self._when = self._when, when
        for node in nodes:
            self.visit(node)
        self._when = outer

    def _visit_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        self._inside(When.CALLED, list(ast.iter_child_nodes(node)))

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = _visit_function

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            self._inside(When.TYPING, node.body)
            self._inside(self._when, node.orelse)
        else:
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        self.found += [Import(alias.name, node.lineno, self._when) for alias in node.names]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = self.package[: len(self.package) - node.level + 1] if node.level else []
        base += [node.module] if node.module else []
        self.found += [Import(".".join([*base, alias.name]), node.lineno, self._when) for alias in node.names]

    def visit_Call(self, node: ast.Call) -> None:
        if ast.unparse(node.func) in ("import_module", "importlib.import_module", "__import__") and node.args:
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                self.found.append(Import(name.value, node.lineno, self._when))
            else:
                self.computed.append(node.lineno)
        self.generic_visit(node)


COMPUTES = ("__init__", "__main__", "earlier")
"""The packages that import their own modules by name, on first use."""


def is_under(target: str, places: tuple[str, ...]) -> bool:
    """Return whether the dotted ``target``, without a leading ``samebits.``, is one of the places or below one."""
    return any(f"{target}.".startswith(f"samebits.{place}.") for place in places)


def breaches(path: str, source: str) -> list[str]:
    """Return every rule that ``source`` breaks as the file ``path``, relative to the package, with its line."""
    place = PurePosixPath(path)
    room = place.parts[0].removesuffix(".py")
    is_pure = room == "core" or path in PURE
    here = ".".join(place.with_suffix("").parts)
    tree = ast.parse(source, filename=f"runtime/samebits/{path}")
    collected = Imports(["samebits", *place.parts[:-1]])
    collected.visit(tree)
    found = [
        *breached_by_place(place, room, tree),
        *breached_by_expressions(room, path, tree, is_pure=is_pure),
        *(f"{line}: imports a module whose name is computed" for line in collected.computed if room not in COMPUTES),
    ]
    for imported in collected.found:
        if path not in (READS_OTHERS_INDEX, WRITES_FOR_TORCHS_TOOL) or imported.target != "pickle":
            found += [f"{imported.line}: {text}" for text in breached_by_import(path, room, imported, is_pure=is_pure)]
            found += [f"{imported.line}: {text}" for text in breached_by_floors(here, imported.target)]
    return [f"runtime/samebits/{path}:{text}" for text in found]


def breached_by_place(place: PurePosixPath, room: str, tree: ast.Module) -> Iterator[str]:
    if room not in MAY_IMPORT:
        yield f"1: lies in no room; the rooms are {', '.join(MAY_IMPORT)}"
    for part in place.parts:
        if part.removesuffix(".py") in NAMES_THAT_SAY_NOTHING:
            yield f"1: {part!r} does not say what lives there"
    if len((ast.get_docstring(tree) or "").split()) < FEWEST_WORDS_OF_AN_OPENING:
        yield "1: opens with no paragraph on what lives here and what never does"


def breached_by_import(path: str, room: str, imported: Import, *, is_pure: bool) -> Iterator[str]:
    target, when = imported.target, imported.when
    outermost = target.partition(".")[0]
    if outermost == "samebits" and room != "earlier":  # which is the whole package under another name
        if not is_under(target, (*MAY_IMPORT.get(room, ()), "errors", "named_file", "printable", "strict_json")):
            yield f"{room} may not import {target}"
        elif when is When.LOADING and is_under(
            target, ONLY_INSIDE_FUNCTIONS.get(path, ONLY_INSIDE_FUNCTIONS.get(room, ()))
        ):
            yield f"{room} may import {target} only inside a function"
    elif is_pure and outermost not in CORE_MAY_IMPORT:
        yield f"a pure module may not import {outermost}: a decision depends on its inputs and `now` alone"
    if outermost in TORCH and (room not in TORCH_ROOMS or path == TORCHRUN_ENTRY):
        yield f"only {', '.join(TORCH_ROOMS)} import {outermost}"
    if outermost in PICKLE:
        yield f"{outermost} runs code that a peer or a file brings"
    if room != "config" and target in {f"os.{name}" for name in ENVIRONMENT}:
        yield f"only config reads {target}"


def floor_of(dotted: str, room: str) -> tuple[str, int] | None:
    """Return the part of the package that ``dotted``, without the leading ``samebits.``, belongs to, and its layer."""
    if not dotted.startswith(f"{room}."):
        return None
    part = dotted.removeprefix(f"{room}.").partition(".")[0]
    return next(((part, height) for height, parts in enumerate(FLOORS[room]) if part in parts), None)


def breached_by_floors(here: str, target: str) -> Iterator[str]:
    for room in FLOORS:
        source, aim = floor_of(here, room), floor_of(target.removeprefix("samebits."), room)
        if source and aim and source[0] != aim[0] and aim[1] >= source[1]:
            yield f"{room}.{source[0]} may not import {target}, which is no floor below it"


def test_every_part_of_a_layered_package_has_a_layer() -> None:
    for room, floors in FLOORS.items():
        folder = PACKAGE.joinpath(*room.split("."))
        parts = {entry.parts[len(folder.parts)].removesuffix(".py") for entry in folder.rglob("*.py")}
        assert parts - {"__init__"} == {part for floor in floors for part in floor}


def breached_by_expressions(room: str, path: str, tree: ast.Module, *, is_pure: bool) -> Iterator[str]:
    os_names = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name == "os"
    }
    without_code = {
        id(node.func)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and "weights_only=True" in map(ast.unparse, node.keywords)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            dotted = ast.unparse(node)
            if isinstance(node.value, ast.Name) and node.value.id in os_names and node.attr in ENVIRONMENT:
                if room != "config":
                    yield f"{node.lineno}: only config reads {dotted}"
            elif (path, dotted) in (
                (SAVES_FOR_OTHER_PROGRAMS, "torch.save"),
                (WRITES_FOR_TORCHS_TOOL, "pickle.dumps"),
            ):
                continue
            elif (path, dotted) == (READS_OTHERS_INDEX, "torch.load"):
                if id(node) not in without_code:
                    yield f"{node.lineno}: {dotted} without weights_only=True pickles"
            elif dotted in UNPICKLING_CALLS or node.attr in PICKLING_CALLS:
                yield f"{node.lineno}: {dotted} pickles"
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            yield f"{node.value.lineno}: allow_pickle pickles"
        elif is_pure and isinstance(node, ast.Call) and ast.unparse(node.func) in CORE_MAY_NOT_CALL:
            yield f"{node.lineno}: a pure module may not call {ast.unparse(node.func)}"


def breaches_below(package: Path) -> list[str]:
    """Return every breach in every source file below ``package``."""
    return [
        breach
        for file in sorted(package.rglob("*.py"))
        for breach in breaches(file.relative_to(package).as_posix(), file.read_text(encoding="utf-8"))
    ]


def test_every_file_respects_its_layer() -> None:
    assert breaches_below(PACKAGE) == []


def packages_in(text: str) -> set[str]:
    """Return the packages, and ``config``, that a cell of the architecture's table names."""
    return {found.partition(".")[0] for found in re.findall(r"`([\w.]+)`", text)}


@pytest.mark.parametrize("page", ["architecture.md", "architecture.zh-CN.md"])
def test_table_of_layers_is_the_one_that_is_checked(page: str) -> None:
    text = (ROOT / "docs/contributors" / page).read_text(encoding="utf-8")
    layers = text.split("\n## ")[2]
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]*) \|", layers, re.MULTILINE))
    shown = {room for room in MAY_IMPORT if (PACKAGE / room).is_dir()} | {"torchx"}
    assert rows.keys() == shown
    permitted = {room: packages_in(" ".join(f"`{place}`" for place in MAY_IMPORT[room])) for room in rows}
    assert {room: packages_in(cell) for room, cell in rows.items()} == {
        room: {package for package in permitted[room] & {*shown, "config"} if package != room} for room in rows
    }


def test_no_file_of_the_repository_has_a_meaningless_name() -> None:
    files = [file for folder in ("tests", "benchmarks", "examples") for file in (ROOT / folder).rglob("*.py")]
    assert files
    assert [file for file in files if file.stem in NAMES_THAT_SAY_NOTHING] == []


OPENING = '"""Small sources with one fault each, to show that the rule against it can fail."""\n'

OFFENDING: list[tuple[str, str, str]] = [
    ("core/decide.py", "from samebits.store import journal", "core may not import samebits.store.journal"),
    ("core/decide.py", "from ..net import server", "core may not import samebits.net.server"),
    ("core/decide.py", "def f():\n    import time", "a pure module may not import time"),
    ("core/decide.py", "from os import path", "a pure module may not import os"),
    ("core/decide.py", "import random", "a pure module may not import random"),
    ("core/decide.py", "import threading", "a pure module may not import threading"),
    ("core/decide.py", "import logging", "a pure module may not import logging"),
    ("core/decide.py", "import socket", "a pure module may not import socket"),
    ("core/decide.py", "from uuid import uuid4", "a pure module may not import uuid"),
    ("core/decide.py", "import torch", "a pure module may not import torch"),
    ("core/decide.py", "import zmq", "a pure module may not import zmq"),
    ("core/decide.py", "print('seated')", "a pure module may not call print"),
    ("account/goodput.py", "import time", "a pure module may not import time"),
    ("hosts/placement.py", "open('hosts')", "a pure module may not call open"),
    ("store/journal.py", "from samebits.net.server import Server", "store may not import samebits.net.server.Server"),
    ("store/journal.py", "import samebits.config", "store may not import samebits.config"),
    ("net/server.py", "from samebits.store.journal import Journal", "net may not import samebits.store.journal"),
    ("service/agent.py", "from samebits.training import group", "service may not import samebits.training.group"),
    (
        "service/agent.py",
        "import importlib\nimportlib.import_module('samebits.commands.x')",
        "service may not import samebits.commands",
    ),
    ("service/agent.py", "import importlib\nimportlib.import_module(name)", "whose name is computed"),
    ("service/agent.py", "if TYPE_CHECKING:\n    import torch", "horovod import torch"),
    ("service/agent.py", "def f():\n    from torch import nn", "horovod import torch"),
    ("service/agent.py", "from samebits import elastic", "service may not import samebits.elastic"),
    (
        "training/group/group.py",
        "from samebits.launcher import follower",
        "training may not import samebits.launcher.follower",
    ),
    (
        "training/group/group.py",
        "from samebits.core.scheduler import SchedulerCore",
        "training may not import samebits.core.scheduler",
    ),
    ("training/group/group.py", "from samebits.net import client", "training may not import samebits.net.client"),
    (
        "commands/run/command.py",
        "from samebits.service.agent import Agent",
        "commands may not import samebits.service.agent",
    ),
    ("commands/run/command.py", "from samebits.training import device", "only inside a function"),
    ("__main__.py", "from samebits.training import device", "__main__ may not import samebits.training"),
    ("__init__.py", "from samebits.training.elastic import run", "only inside a function"),
    ("integrations/torchrun.py", "from samebits.integrations import torchrun_rendezvous", "only inside a function"),
    ("integrations/torchrun.py", "def f():\n    import torch", "horovod import torch"),
    ("training/elastic.py", "from samebits.integrations import accelerate", "training may not import"),
    ("training/elastic.py", "from samebits.training import zygote", "which is no floor below it"),
    (
        "__init__.py",
        "def f():\n    from samebits.launcher import follower",
        "__init__ may not import samebits.launcher.follower",
    ),
    ("training/group/group.py", "from samebits.training.state import rng", "which is no floor below it"),
    ("training/process/context.py", "from samebits.training.sharding import whole", "which is no floor below it"),
    (
        "training/run/process_tuning.py",
        "def f():\n    from samebits.training import elastic",
        "which is no floor below it",
    ),
    ("store/checkpoint/reading.py", "from samebits.store.checkpoint import writer", "which is no floor below it"),
    ("errors.py", "from samebits.config import Settings", "errors may not import samebits.config"),
    ("store/journal.py", "import os\nos.environ['HOME']", "only config reads os.environ"),
    ("store/journal.py", "import os as system\nsystem.getenv('HOME')", "only config reads system.getenv"),
    ("store/journal.py", "from os import environ", "only config reads os.environ"),
    ("store/journal.py", "import pickle", "pickle runs code"),
    ("training/state/torch_state.py", "import torch\ntorch.load('x')", "torch.load pickles"),
    ("training/state/torch_state.py", "import torch\ntorch.save(1, 'x')", "torch.save pickles"),
    ("training/checkpoint/export.py", "import torch\ntorch.load('x')", "torch.load pickles"),
    ("training/checkpoint/dcp_index.py", "import torch\ntorch.load('x')", "torch.load without weights_only"),
    ("training/checkpoint/dcp_index.py", "import torch\ntorch.load('x', weights_only=False)", "without weights_only"),
    ("training/checkpoint/dcp_index.py", "import pickle\npickle.load(file)", "pickle.load pickles"),
    ("training/checkpoint/dcp.py", "import pickle", "pickle runs code"),
    ("commands/stack.py", "import pickle\npickle.loads(file)", "pickle.loads pickles"),
    ("launcher/hang_stacks.py", "import pickle\npickle.dumps({})", "pickle runs code"),
    ("training/state/torch_state.py", "import torch.distributed as dist\ndist.all_gather_object([], 1)", "pickles"),
    ("store/ckpt.py", "import numpy\nnumpy.load('x', allow_pickle=True)", "allow_pickle pickles"),
    ("net/utils.py", "", "does not say what lives there"),
    ("common/codec.py", "", "does not say what lives there"),
    ("helpers.py", "", "lies in no room"),
]


@pytest.mark.parametrize(("path", "source", "expected"), OFFENDING)
def test_breach_is_found(path: str, source: str, expected: str) -> None:
    assert any(expected in breach for breach in breaches(path, OPENING + source)), breaches(path, OPENING + source)


def test_missing_exception_is_found() -> None:
    assert "opens with no paragraph" in breaches("net/server.py", "import zmq")[0]
    assert "opens with no paragraph" in breaches("net/server.py", '"""Codec."""\nimport zmq')[0]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        (
            "core/decide.py",
            "from dataclasses import dataclass\nfrom samebits.core.state import Seat\nfrom . import point",
        ),
        ("core/decide.py", "from ..errors import ProtocolError"),
        ("store/journal.py", "import os\nfrom samebits.core.records import Record\nos.fsync(0)"),
        (
            "service/scheduling/loop.py",
            "import logging\nfrom samebits.net.server import Server\nfrom samebits.store import journal",
        ),
        ("training/checkpoint/export.py", "import torch\ntorch.save(1, 'x')"),
        ("commands/stack.py", "import pickle\npickle.dumps({})"),
        (
            "training/checkpoint/dcp_index.py",
            "import pickle, torch\nclass Index(pickle.Unpickler): ...\ntorch.load('x', weights_only=True)",
        ),
        ("training/group/group.py", "import torch.distributed\nfrom samebits.core.point import Point"),
        (
            "commands/run/command.py",
            "from samebits.service import status\ndef doctor():\n    from samebits.training import device",
        ),
        ("config.py", "import os\nos.environ.get('ROLE')"),
        ("__main__.py", "from samebits.commands import recover"),
        ("__init__.py", "if TYPE_CHECKING:\n    from samebits.training.elastic import run\nelse:\n    import typing"),
        ("__init__.py", "import importlib\ndef __getattr__(name):\n    return importlib.import_module(PLACES[name])"),
    ],
)
def test_permitted_import_is_accepted(path: str, source: str) -> None:
    assert breaches(path, OPENING + source) == []


def test_breach_in_any_file_of_a_tree_is_found(tmp_path: Path) -> None:
    place = tmp_path / "core" / "deep"
    place.mkdir(parents=True)
    (place / "decide.py").write_text(OPENING + "import time\n", encoding="utf-8")
    assert breaches_below(tmp_path) == [
        "runtime/samebits/core/deep/decide.py:2: "
        "a pure module may not import time: a decision depends on its inputs and `now` alone"
    ]


def modules_outside_training() -> list[str]:
    relative = (file.relative_to(PACKAGE.parent).with_suffix("") for file in sorted(PACKAGE.rglob("*.py")))
    dotted = [
        ".".join(place.parts).removesuffix(".__init__") for place in relative if place.parts[1] not in TORCH_ROOMS
    ]
    dotted.remove("samebits.earlier.runtime")  # which is imported as `runtime` only
    dotted.append("samebits.integrations.torchrun")
    assert "samebits" in dotted
    return dotted


@pytest.mark.parametrize(
    "modules", [["samebits", "samebits.__main__"], modules_outside_training()], ids=["scheduler", "all"]
)
def test_without_training_nothing_loads_torch(modules: list[str]) -> None:
    program = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
        "print([name for name in ('torch', 'sklearn') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *modules], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "[]", "")


def test_unsharded_script_does_not_load_sharding_modules() -> None:
    """DTensor, FSDP2 and torch.distributed.checkpoint are imported by scripts that use them; they slow the start."""
    program = (
        "import sys, samebits.training.elastic\n"
        "print([name for name in ('tensor', 'fsdp', 'checkpoint') if f'torch.distributed.{name}' in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
