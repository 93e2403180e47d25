"""Detect within microseconds whether a random number generator was used, and pack generator states.

Reading a state through the library (625 Python numbers, or NumPy's dict) takes longer than comparing it, so the memory
that holds the state is compared directly.

Two of these memory layouts are private to their libraries. Each is first compared with the state that the library
reports; if they differ, the library is used every time:

- CPython's ``_random.Random`` has, after its object header, an ``int`` index and 624 words (``_randommodule.c``).
- NumPy's ``MT19937`` has 624 words and an ``int`` position at ``ctypes.state_address`` (``mt19937.h``). NumPy draws
  normal numbers in pairs and stores the second one elsewhere, so the library is used while one is stored.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from collections.abc import Callable
from typing import Any

import msgpack
import torch

from samebits.errors import CheckpointError

_WORDS = 624
_MT_BYTES = 4 * (_WORDS + 1)
_PYTHON = struct.Struct("=i624I")
_PYTHON_VERSION = 3  # first item of random.getstate()
_Seen = tuple[Any, ...]


class Generators:
    """The states of this process's random number generators when :meth:`look` was last called.

    Attributes:
        version: incremented whenever a look finds a generator used or seeded.
    """

    def __init__(self) -> None:
        self.version = 0
        self._python = _look_at_python()
        self._numpy = _NumpyLook()
        self._seen: _Seen = ()
        self._packed: bytes | None = None
        self._accelerator = _look_at_accelerator()
        self._torch = torch.default_generator.get_state

    def look(self) -> bool:
        """Read the generators, and return whether any has changed since the last call."""
        seen = (self._python(), self._torch().numpy().tobytes(), self._numpy.look(), self._accelerator())
        if seen == self._seen:
            return False
        self._seen, self._packed = seen, None
        self.version += 1
        return True

    def packed(self) -> bytes:
        """Return the states that :meth:`look` found, packed as bytes for :func:`unpack`."""
        if self._packed is None:
            packed: bytes = msgpack.packb(self._seen, use_bin_type=True)
            self._packed = packed
        return self._packed


def unpack(packed: bytes) -> dict[str, Any]:
    """Convert packed states to the form that ``rng.capture`` returns.

    Raises:
        CheckpointError: the bytes are not packed states.
    """
    try:
        (words, gauss), cpu, numpy, accelerator = msgpack.unpackb(packed, raw=False, use_list=False)
        index, *rest = _PYTHON.unpack(words)
        state: dict[str, Any] = {"python": (_PYTHON_VERSION, (*rest, index), gauss), "torch": _tensor(cpu)}
        if numpy is not None:
            name, keys, position, has_gauss, cached = numpy
            keys = torch.frombuffer(bytearray(keys), dtype=torch.uint32)
            state["numpy"] = (name, keys, position, has_gauss, cached)
        if accelerator is not None:
            state[accelerator[0]] = _tensor(accelerator[1])
    except (ValueError, TypeError, struct.error, msgpack.UnpackException) as error:
        raise CheckpointError(f"{len(packed)} bytes that are no generators' states: {error}") from None
    return state


def _tensor(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _look_at_python() -> Callable[[], tuple[bytes, float | None]]:
    """Return a function that reads the state of Python's generator: index, words, and a stored second normal number."""
    inst: Any = random._inst
    told = _ask_python()
    if sys.implementation.name == "cpython" and type(inst).__basicsize__ >= object.__basicsize__ + _MT_BYTES:
        place = (ctypes.c_char * _MT_BYTES).from_address(id(inst) + object.__basicsize__)
        if place.raw == told[0]:
            return lambda: (place.raw, inst.gauss_next)
    return _ask_python


def _ask_python() -> tuple[bytes, float | None]:
    _, (*words, index), gauss = random.getstate()
    return _PYTHON.pack(index, *words), gauss


class _NumpyLook:
    """Reads NumPy's global generator, once the script has imported NumPy."""

    def __init__(self) -> None:
        self._random: Any = None
        self._bits: Any = None
        self._place: Any = None  # the current generator's words, if their location was confirmed
        self._raw = b""
        self._told: tuple[Any, ...] | None = None

    def look(self) -> tuple[Any, ...] | None:
        """Return ``numpy.random.get_state()`` with the keys as bytes.

        Returns the same object as long as the state has not changed.
        """
        if self._random is None:
            self._random = sys.modules.get("numpy.random")
        return self._told if self._random is None or self._is_as_told() else self._ask()

    def _is_as_told(self) -> bool:
        if self._told is None or self._place is None or self._told[3]:
            return False
        return self._bits is self._random.get_bit_generator() and self._raw == self._place.raw

    def _ask(self) -> tuple[Any, ...]:
        name, keys, position, has_gauss, cached = self._random.get_state()
        told = (str(name), keys.tobytes(), int(position), int(has_gauss), float(cached))
        bits = self._random.get_bit_generator()
        if bits is not self._bits:
            self._bits, self._place = bits, None
            if name == "MT19937":
                self._place = (ctypes.c_char * _MT_BYTES).from_address(bits.ctypes.state_address)
        if self._place is not None:
            self._raw = self._place.raw
            if self._raw != told[1] + struct.pack("=i", position):
                self._place = None
        self._told = told
        return told


def _look_at_accelerator() -> Callable[[], tuple[str, bytes] | None]:
    """Return a function that reads the current device's generator state and the name of its device type."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return lambda: None
    state_of, kind = torch.get_device_module(found).get_rng_state, found.type
    return lambda: (kind, state_of().numpy().tobytes())
