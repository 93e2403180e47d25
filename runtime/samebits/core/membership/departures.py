"""Ask workers to leave on purpose: for a departing host, a smaller world or maintenance.

A worker leaves at its next commit. Requests are not written to the journal. The requester repeats them until the node
has left, so a request that is lost with a scheduler is only delayed.
"""

from __future__ import annotations

from collections.abc import Sequence

from samebits.core.ledger import Ledger
from samebits.core.messages import Depart


def ask_to_leave(ledger: Ledger, nodes: Sequence[str], text: str) -> None:
    """Ask the given nodes that hold a live seat to leave, and log ``text`` if it is not empty."""
    state = ledger.state
    for node in dict.fromkeys(nodes):
        seat = state.seats.get(node)
        if seat is not None and seat.is_held:
            ledger.tell_holder(seat, Depart(state.job, state.term, seat.incarnation, text or "it was asked before"))
    if text:
        ledger.ready.say(text)
