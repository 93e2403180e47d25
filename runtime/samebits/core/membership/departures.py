"""Asking workers to leave on purpose: a host goes, a smaller world is wanted, a machine is to be looked after.

Only the asking lives here; leaving is the worker's own, at its next commit, and what follows from it is the world's.
The one idea: nothing of it is written down. Whoever wants a node gone asks until it is, so a request that is lost with
a scheduler costs a moment.
"""

from __future__ import annotations

from collections.abc import Sequence

from samebits.core.ledger import Ledger
from samebits.core.messages import Depart


def ask_to_leave(ledger: Ledger, nodes: Sequence[str], text: str) -> None:
    """Ask those of these nodes who hold a seat and are believed alive; a text is said, and kept in the history."""
    state = ledger.state
    for node in dict.fromkeys(nodes):
        seat = state.seats.get(node)
        if seat is not None and seat.is_held:
            ledger.tell_holder(seat, Depart(state.job, state.term, seat.incarnation, text or "it was asked before"))
    if text:
        ledger.ready.say(text)
