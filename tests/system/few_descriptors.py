"""Run the probe as from a shell with a soft limit of 200 open files."""

from __future__ import annotations

import resource

from tests.system import probe

SOFT_LIMIT = 200


def main() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (SOFT_LIMIT, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    probe.main()


if __name__ == "__main__":
    main()
