"""The observation points of a world for checkers: lists of callbacks.

Frequent events have a list; rare ones are listed by type. ``World`` calls, checkers append.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from samebits.core.ready import Ready
from samebits.core.records import Record
from samebits.core.scheduler import SchedulerCore, SchedulerEvent

if TYPE_CHECKING:
    from tests.simulation.group import Group
    from tests.simulation.worker import Worker

_by_type = partial(defaultdict, list)


@dataclass(slots=True, eq=False)
class Places:
    """``watch_…`` for all of a kind, ``when_…`` by type."""

    watch_loaded: list[Callable[[SchedulerCore], None]] = field(default_factory=list)
    watch_decided: list[Callable[[SchedulerEvent | None, Ready], None]] = field(
        default_factory=list
    )  # if there is anything
    watch_echo: list[Callable[[SchedulerEvent, Ready], None]] = field(default_factory=list)
    watch_durable: list[Callable[[list[Record]], None]] = field(default_factory=list)
    watch_agent: list[Callable[[Worker], None]] = field(default_factory=list)
    watch_trained: list[Callable[[Group], None]] = field(default_factory=list)
    watch_saved: list[Callable[[str], None]] = field(default_factory=list)
    watch_calm: list[Callable[[], None]] = field(default_factory=list)
    watch_end: list[Callable[[], None]] = field(default_factory=list)
    # An event arrives; it has been processed, whatever the result.
    when_event: dict[type, list[Callable[[Any], None]]] = field(default_factory=_by_type)
    when_decided: dict[type, list[Callable[[Any, Ready], None]]] = field(default_factory=_by_type)
    # A record is decided; it is durable.
    when_recorded: dict[type, list[Callable[[SchedulerEvent | None, Any], None]]] = field(default_factory=_by_type)
    when_durable: dict[type, list[Callable[[Any], None]]] = field(default_factory=_by_type)
    # A process sends something, whether or not it arrives.
    when_sent: dict[type, list[Callable[[Worker, Any], None]]] = field(default_factory=_by_type)
    # It receives something.
    when_delivered: dict[type, list[Callable[[Worker, Any], None]]] = field(default_factory=_by_type)
    # An answer is decided, is sent, reaches a process.
    when_answered: dict[type, list[Callable[[str, Any], None]]] = field(default_factory=_by_type)
    when_said: dict[type, list[Callable[[str, Any], None]]] = field(default_factory=_by_type)
    when_noticed: dict[type, list[Callable[[Worker, Any], None]]] = field(default_factory=_by_type)
