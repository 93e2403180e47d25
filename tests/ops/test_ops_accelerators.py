"""How many accelerators run.sh counts, on a machine that seems to have four."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

RUN_SH = Path(__file__).resolve().parents[2] / "scripts" / "run.sh"
COUNT = """
compgen() { [[ $* == *"$PRESENT"* ]] && printf '%s\n' /dev/0 /dev/1 /dev/2 /dev/3; }
eval "$(sed -n '/^accelerators() {/,/^}/p' "$1")"
accelerators
"""


def counted(present: str = "nvidia", **environment: str) -> str:
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", COUNT, "test", str(RUN_SH)],
        env={"PATH": "/usr/bin:/bin", "PRESENT": present, **environment},
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=True,
    ).stdout.strip()


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        ("0", 1),
        ("2,0", 2),
        ("0, 1", 2),
        ("0,1,", 2),
        ("", 0),
        ("-1", 0),
        ("0,1,-1,2", 2),
        ("NoDevFiles", 0),
        ("0,NoDevFiles", 1),
        ("0,,1", 1),
        (",0", 0),
        ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6,GPU-7", 2),
        ("MIG-GPU-8932f937-d72c-4106-c12f-20bd9faed9f6/1/2", 1),
    ],
)
def test_what_is_hidden_is_not_counted(visible: str, count: int) -> None:
    assert counted(CUDA_VISIBLE_DEVICES=visible) == str(count)
    assert counted("davinci", ASCEND_RT_VISIBLE_DEVICES=visible) == str(count)


def test_where_nothing_is_hidden_all_count() -> None:
    assert (counted(), counted("davinci"), counted("none")) == ("4", "4", "0")
    assert counted("none", CUDA_VISIBLE_DEVICES="0,1") == "0"
    assert (counted(DEVICE="cpu"), counted(MS_DEVICE="cpu"), counted(DEVICE="cuda")) == ("0", "0", "4")
