"""Whose word on a state counts: whoever took another's state when a generation began only repeats it.

Here lives who took whose state, of the last generations. Never here: which rank takes it from which (``restore``), what
a difference leads to (``consistency``). The one idea: a bit that has flipped is handed on with the state it is in, so
two ranks with the same wrong value are one witness where one of them has it from the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

Member: TypeAlias = tuple[str, int]
"""A node and its incarnation."""

MOST_GENERATIONS = 64
"""Of the last ones, so many are remembered."""


class Witnesses:
    """Of one scheduler start; one that has just started takes everybody at its own word."""

    def __init__(self) -> None:
        self._took: dict[int, Mapping[Member, Member]] = {}  # by generation: who → from whom

    def begin(self, generation: int, members: Sequence[Member], sources: Mapping[int, int]) -> None:
        """A generation begins, and these ranks become what others send them.

        Args:
            generation: its number.
            members: by rank.
            sources: rank → the rank whose state it takes.
        """
        self._took[generation] = {members[rank]: members[source] for rank, source in sources.items()}
        self._took.pop(generation - MOST_GENERATIONS, None)

    def origins(self, members: Sequence[Member], since: int) -> dict[int, Member]:
        """By rank: whose state it holds, as it was before the first generation behind ``since`` began."""
        origins: dict[Member, Member] = {}
        for _, took in sorted(one for one in self._took.items() if one[0] > since):
            origins |= {member: origins.get(source, source) for member, source in took.items()}
        return {rank: origins.get(member, member) for rank, member in enumerate(members)}
