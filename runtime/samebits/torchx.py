"""A TorchX component: ``torchx run samebits.torchx:dist -j 2x4 --script train.py``.

The component is ``dist.torchrun`` with the rendezvous of this package, on any scheduler that TorchX supports. torchx is
imported inside the function, since this package does not depend on it. TorchX evaluates the annotations of the
arguments, so they cannot be postponed, and recognises the annotation of the result by its name.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchx.specs import AppDef
else:
    AppDef = Any


def dist(
    *script_args: str,
    script: str | None = None,
    m: str | None = None,
    image: str = "",
    name: str = "/",
    h: str | None = None,
    cpu: int = 2,
    gpu: int = 0,
    memMB: int = 1024,
    j: str = "1x2",
    env: dict[str, str] | None = None,
    max_retries: int = 0,
    max_restarts: int = 3,
    port: int = 8118,
    mounts: list[str] | None = None,
    tee: int = 3,
) -> AppDef:
    """Train under torchrun with the rendezvous of SameBits; the script may be ported or not.

    Args:
        script_args: arguments of the script
        script: script to run
        m: Python module to run instead of a script
        image: image of the containers; default: TorchX's own
        name: name of the job, as in dist.torchrun
        h: a named resource, instead of cpu, gpu and memMB
        cpu: CPUs of each node
        gpu: GPUs of each node
        memMB: memory of each node in MB
        j: nodes and processes of each, as in 2x8; 2:3x8 trains on two nodes, and the third is a standby
        env: variables of the processes, as in CLUSTER_SECRET_FILE=/run/secrets/cluster,RECOVERY_PATH=/shared/recovery
        max_retries: how often the scheduler may restart a node
        max_restarts: how often torchrun may restart a node's workers
        port: the scheduler's port on node 0
        mounts: mounts, as in dist.torchrun
        tee: streams that are copied to the console: 0 none, 1 stdout, 2 stderr, 3 both
    """
    from torchx.components import dist as torchx_dist

    nodes = j.rpartition("x")[0] or "1"
    options = {"image": image} if image else {}
    return torchx_dist.torchrun(
        *script_args,
        script=script,
        m=m,
        name=name,
        h=h,
        cpu=cpu,
        gpu=gpu,
        memMB=memMB,
        j=j,
        env={"PET_MAX_RESTARTS": str(max_restarts), **(env or {})},  # torchrun's --max-restarts
        max_retries=max_retries,
        rdzv_port=port,
        rdzv_backend="c10d" if nodes == "1" else "samebits",  # a single node needs no endpoint that others know
        mounts=mounts,
        tee=tee,
        **options,
    )
