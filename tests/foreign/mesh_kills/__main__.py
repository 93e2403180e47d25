"""``python -m tests.foreign.mesh_kills --kills 300 --seed 1``: kill jobs on a device mesh at drawn moments.

Each kill is a line of output. The job must end with the undisturbed run's bits, with its surviving processes, and with
no more steps redone than promised; the command's own status is 1 otherwise. The folder of a failed case is kept.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.foreign import kill_campaign
from tests.foreign.mesh_kills.campaign import MESHES, MeshKills
from tests.system.processes import TRAINING, WarmStarter

SHARDING = ("torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.distributed.checkpoint")


def main() -> int:
    parser = kill_campaign.parser_of("tests.foreign.mesh_kills", __doc__)
    parser.add_argument("--only", nargs="+", choices=MESHES, default=list(MESHES), metavar="MESH")
    parser.add_argument("--shrink", action="store_true", help="continue without the lost shard group, which returns")
    options = parser.parse_args()

    def made(folder: Path, starter: WarmStarter) -> MeshKills:
        return MeshKills(folder, starter, options.only, shrinks=options.shrink)

    starter = WarmStarter((*TRAINING, *SHARDING))
    return kill_campaign.run(options, made, starter)


if __name__ == "__main__":
    sys.exit(main())
