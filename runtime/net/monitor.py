"""The end of a socket whose connection events are read (``zmq_socket_monitor(3)``).

With their queue full ZeroMQ's thread waits for a reader, and holds a lock meanwhile for which ``disable_monitor`` waits
with the interpreter's lock held: whoever then asks for the end of the events ends the process. The one idea: close the
socket, and read on until ZeroMQ says that this was its last event.
"""

from __future__ import annotations

import struct

import zmq

STOPPED = zmq.EVENT_MONITOR_STOPPED  # one of the events that the monitor must be asked for
EVENT = struct.Struct("=HI")  # what happened, and a value: often a descriptor


def close_both(socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
    """Close ``socket``, waiting for as long as it lingers, and the reader of its events."""
    socket.close()
    event = 0
    while event != STOPPED:
        event, _ = EVENT.unpack(monitor.recv_multipart()[0])
    monitor.close(linger=0)
