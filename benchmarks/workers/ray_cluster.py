"""A Ray cluster of one node, whose GCS port is the first argument; the cluster ends with its standard input."""

from __future__ import annotations

import sys

from benchmarks.recovery_trials import WORLD_SIZE


def main() -> None:
    from ray.cluster_utils import Cluster

    node = {"num_cpus": WORLD_SIZE + 1, "object_store_memory": 80_000_000, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "gcs_server_port": int(sys.argv[1])})
    sys.stdin.read()
    cluster.shutdown()


if __name__ == "__main__":
    main()
