"""``python -m tests.foreign.line_kills --kills 300 --seed 1``: kill public-style scripts at random lines.

Each kill is a line of output. It must end with the undisturbed run's bits, or with a message and a nonzero exit status;
the command's own status is 1 if any does neither. The folder of a failed case is kept.
"""

from __future__ import annotations

import sys

from tests.foreign import kill_campaign
from tests.foreign.line_kills.campaign import SCRIPTS, LineKills
from tests.system.processes import WarmStarter


def main() -> int:
    parser = kill_campaign.parser_of("tests.foreign.line_kills", __doc__)
    parser.add_argument("--only", nargs="+", default=[], metavar="SCRIPT", help="names without .py")
    options = parser.parse_args()
    scripts = [path for path in SCRIPTS if not options.only or path.stem in options.only]
    return kill_campaign.run(options, lambda folder, starter: LineKills(folder, starter, scripts), WarmStarter())


if __name__ == "__main__":
    sys.exit(main())
