"""Save random number generators per rank, or derive their states for every step from (seed, rank, step).

A generator's state is lost with its process. With ``PER_STEP``, the same step of the same rank draws the same numbers
in any process, so a rank can continue from any other rank's copy of the weights. With ``SAVED``, each rank's
checkpoints contain its generator states.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import random
import sys
from collections.abc import Callable
from typing import Any

import torch


class RngMode(enum.Enum):
    """The ways to restore the random numbers of a step."""

    SAVED = "saved"
    PER_STEP = "per_step"


def seed_for(seed: int, rank: int, step: int) -> None:
    """Seed Python's, torch's and, if loaded, NumPy's generators for one step of one rank."""
    derived = _derived(seed, rank, step // _BLOCK)[step % _BLOCK]
    random.seed(derived)
    if "numpy" in _modules:
        _modules["numpy"].random.seed(derived & 0xFFFFFFFF)
    _seed_torch()(derived)


def seed_with(name: str) -> None:
    """Seed Python's, torch's and, if loaded, NumPy's generators from a string."""
    derived = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1
    random.seed(derived)
    if "numpy" in _modules:
        _modules["numpy"].random.seed(derived & 0xFFFFFFFF)
    _seed_torch()(derived)


_BLOCK = 64  # in steps
_modules: dict[str, Any] = sys.modules


@functools.lru_cache(maxsize=64)  # a rank with virtual workers draws for several
def _derived(seed: int, rank: int, block: int) -> tuple[int, ...]:
    """Return the seeds for a block of steps. Computing many at once is faster than one per step."""
    digests = (
        hashlib.blake2b(f"{seed}/{rank}/{step}".encode(), digest_size=8).digest()
        for step in range(block * _BLOCK, (block + 1) * _BLOCK)
    )
    return tuple(int.from_bytes(digest, "little") >> 1 for digest in digests)


@functools.cache
def _seed_torch() -> Callable[[int], object]:
    """Return the function that seeds torch's generators.

    Without an accelerator, this is the CPU generator's own function, which takes 1 µs. torch.manual_seed takes 500 µs,
    mostly to format a stack trace for devices that do not exist.
    """
    return torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed


def capture() -> dict[str, Any]:
    """Return the state of all generators of this process, as nested values with tensors.

    The generator state of the current accelerator is stored under its device type: ``cuda``, ``npu``.
    """
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if (numpy_random := _numpy_random()) is not None:
        name, keys, position, has_gauss, cached = numpy_random.get_state()
        state["numpy"] = (str(name), torch.from_numpy(keys.copy()), int(position), int(has_gauss), float(cached))
    if (found := torch.accelerator.current_accelerator(check_available=True)) is not None:
        state[found.type] = torch.get_device_module(found).get_rng_state()
    return state


def restore(state: dict[str, Any]) -> None:
    """Restore the result of :func:`capture`."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"].clone())
    if "numpy" in state and (numpy_random := _numpy_random()) is not None:
        name, keys, position, has_gauss, cached = state["numpy"]
        numpy_random.set_state((name, keys.numpy(), position, has_gauss, cached))
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is not None and found.type in state:
        torch.get_device_module(found).set_rng_state(state[found.type].clone())


def _numpy_random() -> Any:
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.random
