"""Limits on what a reader must hold in mind at once: methods of a class, lines of a function, files of a folder.

A file may be as long as its subject.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "runtime" / "samebits"
MOST_PUBLIC_METHODS = 25
MOST_LINES_OF_A_FUNCTION = 60
MOST_FILES_OF_A_FOLDER = 20

LARGE_CLASSES = {
    "training/checkpoint/state_points.py:StatePoints": "what a run asks of a state's points",
    "training/state/base_state.py:State": "what a state of a user's own may override, beside the library's hooks",
}
"""Larger classes, each with the reason why its methods belong together."""
LONG_FUNCTIONS = {
    "commands/run/options.py:parse": "one rule an option, in the table's order",
    "commands/run/options.py:parser_for": "one table: every option of `samebits run`",
    "core/agent/agent_core.py:_hear": "one `match`: every message of the scheduler",
    "core/restore.py:choose_restore_point": "one rule, in the order in which its cases are tried",
    "core/state.py:apply": "one `match`: every record of the journal",
    "dashboard/web_app.py:app_of": "one table: every route of the page",
    "service/agent.py:__init__": "every field of the agent with what it is for",
    "service/agent.py:_notice": "one `match`: every notice of the agent",
}
"""Longer functions, each with the reason why a reader is better served by one."""


def public_methods(one: ast.ClassDef) -> int:
    functions = (part for part in one.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef))
    return sum(not part.name.startswith("_") for part in functions)


def lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the lines of a function, less its docstring."""
    docstring = function.body[0]
    has_one = isinstance(docstring, ast.Expr) and isinstance(docstring.value, ast.Constant)
    of_docstring = (docstring.end_lineno or 0) - docstring.lineno + 1 if has_one else 0
    return (function.end_lineno or 0) - function.lineno + 1 - of_docstring


def sources() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield str(path.relative_to(PACKAGE)), ast.parse(path.read_text())


def test_no_class_has_more_public_methods_than_a_reader_can_keep_apart() -> None:
    large = {
        f"{name}:{one.name}"
        for name, tree in sources()
        for one in ast.walk(tree)
        if isinstance(one, ast.ClassDef) and public_methods(one) > MOST_PUBLIC_METHODS
    }
    assert large == set(LARGE_CLASSES)


def test_a_long_function_has_a_stated_cause() -> None:
    long = {
        f"{name}:{one.name}"
        for name, tree in sources()
        for one in ast.walk(tree)
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) and lines(one) > MOST_LINES_OF_A_FUNCTION
    }
    assert long == set(LONG_FUNCTIONS)


def test_no_folder_has_more_files_than_a_reader_can_scan() -> None:
    folders = {str(path.parent.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py")}
    assert not [name for name in folders if len(list((PACKAGE / name).glob("*.py"))) > MOST_FILES_OF_A_FOLDER]


OF_OTHER_FRAMEWORKS = {
    "TorchState": "Horovod's users import it from its elastic module",
    "Trainer": "Lightning's and transformers' users import it from their integration",
}
"""Names that other frameworks give, each with the reason why it has two definitions."""


def public_names(tree: ast.Module) -> Iterator[str]:
    """Yield the classes and the names of types that a module defines."""
    for part in tree.body:
        if isinstance(part, ast.ClassDef):
            yield part.name
        elif isinstance(part, ast.Assign) and isinstance(part.targets[0], ast.Name):
            name, value = part.targets[0].id, ast.unparse(part.value)
            if name[0].isupper() and not name.isupper() and not value.startswith("TypeVar("):
                yield name


def test_each_public_name_has_one_definition() -> None:
    """A reader who greps for a class must find that class only."""
    places: dict[str, list[str]] = {}
    for file, tree in sources():
        for name in public_names(tree):
            places.setdefault(name, []).append(file)
    repeated = {name: files for name, files in places.items() if len(files) > 1 and not name.startswith("_")}
    assert repeated.keys() == OF_OTHER_FRAMEWORKS.keys(), repeated
