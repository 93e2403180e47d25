"""The process of one coverage-guided campaign: it instruments ``samebits`` and then runs libFuzzer.

``python -m tests.fuzz`` starts it; its arguments are a target's name and libFuzzer's own flags and folders.
"""

from __future__ import annotations

import sys

import atheris  # an optional extra: only this process imports it

with atheris.instrument_imports(include=["samebits"]):
    from tests.fuzz.targets import TARGETS

if __name__ == "__main__":
    check = TARGETS[sys.argv[1]].check
    atheris.Setup([sys.argv[0], *sys.argv[2:]], lambda data: check(bytes(data)))
    atheris.Fuzz()
