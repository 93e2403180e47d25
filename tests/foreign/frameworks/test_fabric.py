"""Lightning Fabric's loop ends with the undisturbed bits after a restart and after a replacement by a spare."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.foreign.frameworks.conftest import EXAMPLES

pytestmark = [pytest.mark.system, pytest.mark.thorough]

LOOP = EXAMPLES / "fabric_loop.py"


def test_fabrics_loop_ends_with_the_undisturbed_bits(ends_with_the_undisturbed_bits: Callable[..., None]) -> None:
    ends_with_the_undisturbed_bits(LOOP, steps=30, kills=["1:7", "0:16"])
