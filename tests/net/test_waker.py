"""Waking across threads: a wake reaches a sleeper, many count as one, a late one touches no descriptor."""

from __future__ import annotations

import os
import select
import threading

from samebits.net.sockets import Waker


def is_readable(waker: Waker) -> bool:
    return bool(select.select([waker.descriptor], [], [], 0)[0])


def test_wake_is_seen_until_it_is_cleared() -> None:
    waker = Waker()
    try:
        for _ in range(100_000):  # more than a pipe holds
            waker.wake()
        assert is_readable(waker)
        while is_readable(waker):
            waker.rest()
        waker.rest()
    finally:
        waker.close()


def test_wake_during_the_close_writes_to_no_other_file() -> None:
    """A closed descriptor's number is reused at once."""
    for _ in range(200):
        waker = Waker()
        go = threading.Barrier(2)

        def wake(waker: Waker = waker, go: threading.Barrier = go) -> None:
            go.wait()
            for _ in range(50):
                waker.wake()

        thread = threading.Thread(target=wake)
        thread.start()
        go.wait()
        waker.close()
        theirs, ours = os.pipe2(os.O_NONBLOCK)  # gets the numbers that were closed
        thread.join()
        try:
            assert not select.select([theirs], [], [], 0)[0], "another file was written to"
        finally:
            os.close(theirs)
            os.close(ours)
