"""Lines of nodes: ``2``, then its replacements ``2.1``, ``2.2`` and so on, each started for the one before.

Only the names live here, for whoever gives them and whoever judges them. The one idea: a replacement's name says whose
it is, so the line's first node, its number and its host's device are found without a table.
"""

from __future__ import annotations

import re

_REPLACEMENT = re.compile(r"([0-9]{1,18})\.([1-9][0-9]{0,8})")


def root_of(node: str) -> str:
    """The first node of the line; the node itself where its name is not a replacement's."""
    found = _REPLACEMENT.fullmatch(node)
    return node if found is None else found[1]


def number_of(node: str) -> int:
    """Which of its line's replacements the node is; 0 of the first node."""
    found = _REPLACEMENT.fullmatch(node)
    return 0 if found is None else int(found[2])


def successor_of(node: str) -> str:
    """The replacement of this node. A node whose id is not a number has none: :class:`ValueError`."""
    root = root_of(node)
    if not may_be_replaced(node):
        raise ValueError(f"{node!r} is not a number, nor a replacement of one")
    return f"{root}.{number_of(node) + 1}"


def may_be_replaced(node: str) -> bool:
    """Whether the node's name lets another one say that it is its replacement."""
    return _REPLACEMENT.fullmatch(f"{root_of(node)}.{number_of(node) + 1}") is not None


def replaces(node: str, other: str) -> bool:
    """Whether ``node`` is a later replacement in the line of ``other``."""
    return root_of(node) == root_of(other) and number_of(node) > number_of(other)
