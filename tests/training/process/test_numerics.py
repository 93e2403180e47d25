"""The description of everything that decides a result's bits."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch

from samebits.training.process.numerics import describe, settle_threads

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    mkldnn, precision = torch.backends.mkldnn.enabled, torch.backends.mkldnn.matmul.fp32_precision
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
    torch.set_flush_denormal(False)
    torch.set_default_dtype(torch.float32)
    torch.backends.mkldnn.enabled = mkldnn
    torch.backends.mkldnn.matmul.fp32_precision = precision


def test_description_is_text_in_a_fixed_order() -> None:
    described = describe(CPU)
    assert described == describe(CPU)
    assert all(isinstance(name, str) and isinstance(value, str) for name, value in described)
    assert len(dict(described)) == len(described)
    assert dict(described)["torch"] == torch.__version__
    assert dict(described)["device"] == "cpu"


CHANGES: dict[str, Callable[[], object]] = {
    "threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "deterministic algorithms": lambda: torch.use_deterministic_algorithms(True),
    "denormals flushed to zero": lambda: torch.set_flush_denormal(True),
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "mkldnn.enabled": lambda: setattr(torch.backends.mkldnn, "enabled", False),
    "mkldnn.matmul.fp32_precision": lambda: torch.set_float32_matmul_precision("medium"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_change_appears_under_its_name(name: str) -> None:
    before = describe(CPU)
    CHANGES[name]()
    assert [one[0] for one, other in zip(before, describe(CPU), strict=True) if one != other] == [name]


def test_mixed_old_and_new_precision_switches_can_be_described() -> None:
    torch.set_float32_matmul_precision("medium")
    torch.backends.mkldnn.matmul.fp32_precision = "tf32"
    assert dict(describe(CPU))["mkldnn.matmul.fp32_precision"] == "tf32"


def test_two_processes_are_compared_by_it() -> None:
    code = "import torch; from samebits.training.process.numerics import describe; print(describe(torch.device('cpu')))"

    def printed(threads: str) -> str:
        return subprocess.run(
            [sys.executable, "-c", code], env={"OMP_NUM_THREADS": threads}, capture_output=True, text=True, check=True
        ).stdout

    one, same, other = (printed(threads) for threads in ("1", "1", "3"))
    assert one == same
    assert one != other


CORES = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("workers", "environment", "of_the_script", "expected"),
    [
        (8, {}, CORES, 1),
        (1, {}, CORES, CORES),
        (8, {"OMP_NUM_THREADS": "3"}, CORES, CORES),
        (8, {"MKL_NUM_THREADS": "3"}, CORES, CORES),
        (8, {}, CORES + 3, CORES + 3),
    ],
)
def test_workers_share_cores_unless_the_user_has_set_threads(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    workers: int,
    environment: dict[str, str],
    of_the_script: int,
    expected: int,
) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "")  # restored afterwards, whatever the call leaves
        if name in environment:
            monkeypatch.setenv(name, environment[name])
    torch.set_num_threads(of_the_script)
    with caplog.at_level("INFO", logger="samebits"):
        was_set = settle_threads(workers)
    assert dict(describe(CPU))["threads"] == str(expected)
    assert was_set == (workers == 8 and not environment and of_the_script == CORES)
    assert ("one thread for each of 8 workers" in caplog.text) == was_set
    assert (os.environ["OMP_NUM_THREADS"] == "1") == was_set, "libraries that load later read it"
