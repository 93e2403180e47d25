"""What ZeroMQ tells of connections: over which a message came, and the end of a socket whose events are read.

With their queue full ZeroMQ's thread waits for a reader, and holds a lock meanwhile for which ``disable_monitor``
(``zmq_socket_monitor(3)``) waits with the interpreter's lock held: whatever then asks for the end of the events ends
the process. So the socket is closed first, and its events are read up to the last one.
"""

from __future__ import annotations

import struct

import zmq

STOPPED = zmq.EVENT_MONITOR_STOPPED  # one of the events that the monitor must be asked for
EVENT = struct.Struct("=HI")  # what happened, and a value: often a descriptor
_SRCFD = int(zmq.SRCFD)


def close_both(socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
    """Close ``socket``, waiting for as long as it lingers, and the reader of its events."""
    socket.close()
    event = 0
    while event != STOPPED:
        event, _ = EVENT.unpack(monitor.recv_multipart()[0])
    monitor.close(linger=0)


def source_of(body: zmq.Frame) -> int | None:
    """Return the descriptor of the connection that a message came over, or None if ZeroMQ keeps none.

    It keeps none of a peer of ZMTP 1.0 or 2.0, and takes whatever does not begin with a signature for one: a browser, a
    scrape, a TLS hello, five bytes.
    """
    try:
        return int(body.get(_SRCFD))
    except zmq.ZMQError as error:
        if error.errno != zmq.EINVAL:
            raise
        return None
