"""Random messages of a stranger: every type of the protocol, with fields at their bounds or with a job's values."""

from __future__ import annotations

import enum
import types
import typing
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from samebits.core import messages

FROM_ANYBODY = (
    messages.Register,
    messages.Heartbeat,
    messages.Join,
    messages.KeyCall,
    messages.Publish,
    messages.Leave,
    messages.ReportEnvelope,
    messages.StatusQuery,
    messages.OperatorDecision,
    messages.ProcessEnded,
    messages.ProcessSeen,
    messages.Restarting,
    messages.StopJob,
)
FROM_NOBODY = (
    messages.Admitted,
    messages.GenerationStarted,
    messages.EndJob,
    messages.Status,
    messages.KeyAnswer,
    messages.Depart,
)
EDGES = (-(2**63), -1, 0, 1, 2, 3, 4, 5, 2**31, 2**63 - 1)
WORDS = ("", "0", "1", "2", "3", "07", "-1", "a", "node-1", "٣", "9" * 30, "x" * 5000, "a b", "\x1b[2J", "\n", "digits")


def messages_of(kinds: Sequence[type], known: dict[str, Sequence[Any]]) -> st.SearchStrategy[Any]:
    """Any message of these types; ``known`` gives, by field name, values of a running job."""
    return st.one_of([_dataclass(kind, known) for kind in kinds])


def _dataclass(kind: type, known: dict[str, Sequence[Any]]) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(kind)
    fields = {name: _field(name, hints[name], known) for name in kind.__match_args__}
    return st.builds(kind, **fields)


def _field(name: str, hint: Any, known: dict[str, Sequence[Any]]) -> st.SearchStrategy[Any]:
    drawn = _value(hint, known)
    used = known.get(name)
    return st.one_of(st.sampled_from(list(used)), drawn) if used else drawn


def _value(hint: Any, known: dict[str, Sequence[Any]]) -> st.SearchStrategy[Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        inner = st.one_of([_value(argument, known) for argument in arguments if argument is not type(None)])
        return st.none() | inner if type(None) in arguments else inner
    if origin is tuple and arguments[1:] == (Ellipsis,):
        return st.lists(_value(arguments[0], known), max_size=4).map(tuple)
    if origin is tuple:
        return st.tuples(*(_value(argument, known) for argument in arguments))
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return st.sampled_from(hint)
    if hasattr(hint, "__match_args__"):
        return _dataclass(hint, known)
    return {
        int: st.sampled_from(EDGES) | st.integers(-(2**63), 2**63 - 1),
        float: st.floats(),
        bool: st.booleans(),
        bytes: st.binary(max_size=40),
        str: st.sampled_from(WORDS) | st.text(max_size=20),
    }[hint]
