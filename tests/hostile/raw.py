"""Bytes that open ports receive from other programs: browsers, scrapers, scanners, old peers.

The module has these openings by name, and a connection that sends one. To ZeroMQ, anything that does not begin with
ZMTP 3's signature is a peer of ZMTP 1.0, and what follows is taken for its messages.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Mapping
from contextlib import suppress

PATIENCE_S = 10.0
_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"  # RFC 13, 15 and 23: what ZMTP 2 and 3 begin with
_GREETING = _SIGNATURE + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_READY = b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER\x08Identity\0\0\0\0"
_HEADERS = b"Host: localhost:8118\r\nUser-Agent: "
_HELLO = bytes.fromhex(
    "16030100c8010000c40303" + "5a" * 32 + "20" + "a5" * 32 + "003e130213031301c02cc030009fcca9cca8ccaac02bc02f009ec024"
    "c028006bc023c0270067c00ac0140039c009c0130033009d009c003d003c0035002f00ff0100003d000b000403000102000a000c000a001d0017"
    "001e00190018002b00050403040303000d0010000e0403050306030807080808090804002d00020101"
)

OPENINGS: Mapping[str, bytes] = {
    "five bytes": b"\x01\x00\x02\x00B",
    "ZMTP 1.0, named": b"\x05\x00peer" + b"\x06\x00hello" * 3,
    "ZMTP 1.0, a part of more": b"\x01\x00\x02\x01B\x02\x00B",
    "ZMTP 1.0, a long message": b"\x01\x00\xff" + (300).to_bytes(8, "big") + b"\x00" + b"B" * 299,
    "ZMTP 1.0, a message that is none": b"\x01\x00\x01\x00" * 20,
    "ZMTP 1.0, four gigabytes claimed": b"\x01\x00\xff" + (1 << 32).to_bytes(8, "big") + b"\x00B",
    "ZMTP 2.0": _SIGNATURE + b"\x01\x05" + b"\x00\x00" + b"\x00\x05hello",
    "ZMTP 2.0, named": _SIGNATURE + b"\x01\x05" + b"\x00\x04peer" + b"\x00\x05hello" * 3,
    "ZMTP 2.0, a command": _SIGNATURE + b"\x01\x05" + b"\x00\x00" + b"\x04\x05hello",
    "ZMTP 2.0, as a subscriber": _SIGNATURE + b"\x01\x02" + b"\x00\x00" + b"\x00\x02\x01a",
    "ZMTP 3, half a greeting": _GREETING[:30],
    "ZMTP 3, greeting alone": _GREETING,
    "ZMTP 3, a message before READY": _GREETING + b"\x00\x05hello",
    "ZMTP 3, a socket type that is none": _GREETING + b"\x04\x1a\x05READY\x0bSocket-Type\0\0\0\x04NONE",
    "ZMTP 3, READY that lies about its length": _GREETING + b"\x04\x1a\x05READY\x0bSocket-Type\x7f\xff\xff\xffDEAL",
    "ZMTP 3, ERROR": _GREETING + b"\x04\x0a\x05ERROR\x03500",
    "ZMTP 3, a command after READY": _GREETING + b"\x04" + bytes([len(_READY)]) + _READY + b"\x04\x06\x05WHAT!",
    "ZMTP 3, an empty message": _GREETING + b"\x04" + bytes([len(_READY)]) + _READY + b"\x00\x00" * 3,
    "ZMTP 3, reserved flags": _GREETING + b"\x04" + bytes([len(_READY)]) + _READY + b"\xf8\x02hi",
    "ZMTP 3.7 with a mechanism of its own": _SIGNATURE + b"\x03\x07" + b"KERBEROS".ljust(20, b"\0") + bytes(32),
    "ZMTP 99": _SIGNATURE + b"\x63\x00" + bytes(52),
    "a signature alone": _SIGNATURE,
    "browser": b"GET / HTTP/1.1\r\n" + _HEADERS + b"Mozilla/5.0 (X11; Linux x86_64)\r\n"
    b"Accept: text/html,application/xhtml+xml\r\nAccept-Language: en\r\nConnection: keep-alive\r\n\r\n",
    "Prometheus": b"GET /metrics HTTP/1.1\r\n" + _HEADERS + b"Prometheus/2.51.0\r\n"
    b"Accept: application/openmetrics-text;version=1.0.0\r\nX-Prometheus-Scrape-Timeout-Seconds: 10\r\n\r\n",
    "POST": b"POST /x HTTP/1.1\r\n" + _HEADERS + b"x\r\nContent-Length: 300\r\n\r\n" + b"B" * 300,
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x12\x04\x00\x00\x00\x00\x00",
    "TLS": _HELLO,
    "SSH": b"SSH-2.0-OpenSSH_9.6\r\n",
    "Redis": b"*1\r\n$4\r\nPING\r\n",
    "line breaks": b"\r\n\r\n",
    "zeros": bytes(4096),
    "ones": b"\x01" * 4096,
    "all of a byte": bytes(range(256)) * 8,
}


def drawn(seed: int) -> bytes:
    """Return some thousand bytes, after a short one of the openings or none; the seed determines them."""
    chance = random.Random(seed)
    opening = chance.choice([b"", *OPENINGS.values()])
    return opening[: chance.randrange(80)] + chance.randbytes(chance.randrange(1, 2000))


def say(port: int, words: bytes, *, half: bool = False) -> bytes:
    """Connect, send everything (or half, and hang up), and read the answer until the other end closes, too."""
    answered = b""
    with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as connection, suppress(OSError):
        connection.sendall(words[: len(words) // 2] if half else words)
        if half:
            return b""
        connection.shutdown(socket.SHUT_WR)  # it then reads to the end, and closes
        while data := connection.recv(4096):
            answered += data
    return answered
