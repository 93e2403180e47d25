"""Whether a worker that was started is heard of: the moment at which it is worth asking.

Clock arithmetic only; who has joined is the caller's to find out. The one idea: each process is asked about once.
"""

from __future__ import annotations

from samebits.store.process_identity import ProcessIdentity

PATIENCE_S = 15.0  # from a process's start to its samebits.init(), imports included


class Silence:
    """Processes whose ``samebits.init()`` was not looked for yet."""

    def __init__(self) -> None:
        self._asked_at: dict[str, tuple[ProcessIdentity, float]] = {}

    def began(self, name: str, identity: ProcessIdentity, now: float) -> None:
        """A process was found under this name."""
        self._asked_at[name] = identity, now + PATIENCE_S

    def wake_at(self) -> float | None:
        """When ``due`` has something to give."""
        return min((at for _, at in self._asked_at.values()), default=None)

    def due(self, now: float) -> dict[str, ProcessIdentity]:
        """Who has had time enough; those that wait a moment longer are taken along, to be said together."""
        if not any(at <= now for _, at in self._asked_at.values()):
            return {}
        found = {name: identity for name, (identity, at) in self._asked_at.items() if at <= now + 1.0}
        for name in found:
            del self._asked_at[name]
        return found
