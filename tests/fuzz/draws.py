"""Choices read from bytes, so that a fuzzer of bytes can drive a structured input. Past the end every choice is 0."""

from __future__ import annotations


class Draws:
    """Reads choices from ``data`` one after the other."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def is_used_up(self) -> bool:
        return self._at >= len(self._data)

    def below(self, limit: int) -> int:
        """Return a number from 0 to ``limit`` - 1, from as many bytes as the limit needs."""
        size = max(1, (limit - 1).bit_length() + 7 >> 3)
        return int.from_bytes(self.take(size), "little") % limit

    def take(self, size: int) -> bytes:
        """Return the next ``size`` bytes, or what is left."""
        taken = self._data[self._at : self._at + size]
        self._at += size
        return taken

    def text(self, limit: int) -> str:
        """Return a text of fewer than ``limit`` bytes as the system passes one: any bytes (PEP 383) but NUL."""
        return self.take(self.below(limit)).replace(b"\0", b"").decode("utf-8", "surrogateescape")
