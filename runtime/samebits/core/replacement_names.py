"""Names of replacement nodes: ``2.1``, then ``2.2`` and so on, replace node ``2``.

A replacement's name contains that of the first node. No table is therefore needed to find the first node, the
replacement's number and its device.
"""

from __future__ import annotations

import re

_REPLACEMENT = re.compile(r"([0-9]{1,18})\.([1-9][0-9]{0,8})")
_NAMED = re.compile(r"\b(worker|spare|node) ([0-9]{1,18})\.([1-9][0-9]{0,8})\b(?!\.[0-9])( \((?=\S))?")
_ORDINALS = ("second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")


def root_of(node: str) -> str:
    """Return the first node that this node replaces, or the node itself if it is not a replacement."""
    found = _REPLACEMENT.fullmatch(node)
    return node if found is None else found[1]


def number_of(node: str) -> int:
    """Return the number of the replacement, or 0 for a first node."""
    found = _REPLACEMENT.fullmatch(node)
    return 0 if found is None else int(found[2])


def title_of(node: str) -> str:
    """Return a node's name for messages: ``2``, or ``2 (second process)`` for ``2.1``."""
    return _titled(root_of(node), number_of(node)) if number_of(node) else node


def titled(text: str) -> str:
    """Return the text with ``worker 2.1 (pid 7)`` as ``worker 2 (second process, pid 7)``."""
    return _NAMED.sub(_retitled, text)


def _retitled(found: re.Match[str]) -> str:
    noun, root, number, bracket = found.groups()
    if bracket:
        return f"{noun} {root} ({_ordinal(int(number))} process, "
    if noun == "node":  # it is in parentheses already
        return f"{noun} {root}, {_ordinal(int(number))} process"
    return f"{noun} {_titled(root, int(number))}"


def _titled(root: str, number: int) -> str:
    return f"{root} ({_ordinal(number)} process)"


def _ordinal(number: int) -> str:
    """Return the ordinal word for a replacement, such as "second" for number 1."""
    return _ORDINALS[number - 1] if number <= len(_ORDINALS) else f"{number + 1}th"


def successor_of(node: str) -> str:
    """Return the name of this node's next replacement.

    Raises:
        ValueError: the node id is not a number.
    """
    root = root_of(node)
    if not may_be_replaced(node):
        raise ValueError(f"{node!r} is not a number, nor a replacement of one")
    return f"{root}.{number_of(node) + 1}"


def may_be_replaced(node: str) -> bool:
    """Return whether a node with this name can be replaced: it is a number or itself a replacement."""
    return _REPLACEMENT.fullmatch(f"{root_of(node)}.{number_of(node) + 1}") is not None


def replaces(node: str, other: str) -> bool:
    """Return whether ``node`` is a later replacement of the same first node as ``other``."""
    return root_of(node) == root_of(other) and number_of(node) > number_of(other)
