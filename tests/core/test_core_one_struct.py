"""One struct per fact: no two classes of the core and its shells have the same fields."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import typing
from collections import defaultdict
from types import ModuleType

import msgspec

import samebits.core
import samebits.service
from samebits.core import messages, records, reports

OTHER_FACTS: dict[frozenset[str], str] = {
    frozenset({"generation", "step"}): "a point is a state, a cut is a bound, and Completed a moment",
    frozenset({"message", "session"}): "what came in, and what goes out",
}
"""Field sets that different facts share, each with the reason."""


UNIONS = (messages.SCHEMA.kinds, records.SCHEMA.kinds)
"""For these the tag is part of the fact."""


def modules_of(room: ModuleType) -> list[ModuleType]:
    return [importlib.import_module(one.name) for one in pkgutil.walk_packages(room.__path__, f"{room.__name__}.")]


def fields_of(kind: type) -> frozenset[str]:
    if issubclass(kind, msgspec.Struct):
        return frozenset(kind.__struct_fields__)
    if dataclasses.is_dataclass(kind):
        return frozenset(field.name for field in dataclasses.fields(kind))
    return frozenset(getattr(kind, "_fields", ()))


def alike(*rooms: ModuleType, least: int) -> dict[frozenset[str], list[str]]:
    """Return the sets of at least this many fields that several classes have, with the classes."""
    found: dict[frozenset[str], list[type]] = defaultdict(list)
    for module in [one for room in rooms for one in modules_of(room)]:
        for kind in vars(module).values():
            is_own = isinstance(kind, type) and kind.__module__ == module.__name__ and "__annotations__" in vars(kind)
            if is_own and len(fields_of(kind)) >= least:
                found[fields_of(kind)].append(kind)
    return {
        fields: [kind.__qualname__ for kind in kinds]
        for fields, kinds in found.items()
        if len(kinds) > 1 and not any(set(kinds) <= set(one) for one in UNIONS)
    }


def test_no_two_classes_have_the_same_fields() -> None:
    assert alike(samebits.core, samebits.service, least=2).keys() == OTHER_FACTS.keys()


def test_each_report_is_declared_once() -> None:
    """Reports with a single field are included, unlike in the other checks."""
    kinds = typing.get_args(reports.Report)
    assert len({fields_of(kind) for kind in kinds}) == len(kinds) >= 9
    of_messages = [fields_of(kind) - {"sender"} for kind in typing.get_args(messages.FromWorker)]
    assert not {fields_of(kind) for kind in kinds} & {*of_messages}
