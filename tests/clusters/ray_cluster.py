"""Run a real Ray cluster of several raylets on this machine, in a process of its own.

``python -m tests.clusters.ray_cluster 3`` prints a JSON object with the cluster's address and the pids of its raylets;
each line ``add`` on its standard input adds a node and prints its pid. The cluster ends with its standard input.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping
from typing import IO, Any

from tests.system.processes import REPOSITORY

NODE: Mapping[str, Any] = {"num_cpus": 1, "object_store_memory": 80_000_000}


def is_installed() -> bool:
    return importlib.util.find_spec("ray") is not None


class RayCluster:
    """The cluster, as a test holds it.

    Attributes:
        address: for RAY_ADDRESS.
        raylets: pid of each node's raylet, the head's first.
    """

    def __init__(self, nodes: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.clusters.ray_cluster", str(nodes)],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        told = self._answer()
        self.address: str = told["address"]
        self.raylets: list[int] = told["raylets"]

    def add_node(self) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        stdin.write("add\n")
        stdin.flush()
        self.raylets.append(self._answer()["raylet"])

    def _answer(self) -> dict[str, Any]:
        stdout = self._process.stdout
        assert stdout is not None
        line = stdout.readline()
        assert line, f"the cluster ended with status {self._process.wait()}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def serve(nodes: int, words: IO[str]) -> None:
    from ray.cluster_utils import Cluster

    def pid(node: Any, kind: str) -> int:
        return int(node.all_processes[kind][0].process.pid)

    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    members = [cluster.head_node, *(cluster.add_node(**NODE) for _ in range(nodes - 1))]
    raylets = [pid(node, "raylet") for node in members]
    print(json.dumps({"address": cluster.address, "raylets": raylets}), flush=True)
    for _ in words:
        print(json.dumps({"raylet": pid(cluster.add_node(**NODE), "raylet")}), flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    serve(int(sys.argv[1]), sys.stdin)
