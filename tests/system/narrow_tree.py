"""Run the probe so that its scheduler keeps one relay at itself and one below each: a few relays form a chain."""

from __future__ import annotations

from samebits.net import relay_tree
from tests.system import probe


def main() -> None:
    relay_tree.FAN_OUT = 1  # type: ignore[misc]
    probe.main()


if __name__ == "__main__":
    main()
