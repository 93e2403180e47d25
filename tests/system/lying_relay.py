"""A relay that lies once the file ``lies`` is in its folder.

It then repeats and changes its workers' messages, and no longer reports that a worker's connection has closed.
"""

from __future__ import annotations

import random
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from samebits.__main__ import main
from samebits.net.relaying import Upward
from samebits.service import relay

LIES = Path("lies")
_recorded: defaultdict[str, list[bytes]] = defaultdict(list)
_honest = relay.frames_of


def lying_frames_of(messages: Sequence[tuple[str, bytes]], closed: Sequence[str]) -> Iterator[Upward]:
    """Pack the messages, and for each worker ever heard a recorded one and a changed one."""
    for session, sealed in messages:
        _recorded[session].append(sealed)
    if not LIES.exists():
        return _honest(messages, closed)
    lies = []
    for session, known in _recorded.items() if messages else ():
        repeated, changed = random.choice(known), random.choice(known)
        lies += [(session, repeated), (session, changed[:-1] + bytes([changed[-1] ^ 1]))]
    return _honest([*messages, *lies], ())


if __name__ == "__main__":
    relay.frames_of = lying_frames_of
    sys.exit(main(["relay"]))
