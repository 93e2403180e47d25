"""Run a real Ray cluster of several raylets on this machine, in a process of its own.

``python -m tests.clusters.ray_cluster 3`` prints a JSON object with the cluster's address and the pids of its raylets.
Each line on its standard input prints another: ``add`` adds a node, ``gcs`` kills the control service (GCS) and starts
it again. The cluster ends with its standard input. With RAY_REDIS_ADDRESS, the GCS keeps its tables in that Redis.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import IO, Any

from tests.system.processes import REPOSITORY, free_port

HOSTS = 3
"""Number of hosts of the tests' jobs."""
REDIS = shutil.which("redis-server")
NODE: Mapping[str, Any] = {"num_cpus": 1, "object_store_memory": 80_000_000}


def is_installed() -> bool:
    return importlib.util.find_spec("ray") is not None


class RayCluster:
    """The cluster, as a test holds it.

    Args:
        nodes: number of nodes.
        redis: whether the GCS keeps its tables in a Redis, which starts and ends with the cluster.

    Attributes:
        address: for RAY_ADDRESS.
        raylets: pid of each node's raylet, the head's first.
    """

    def __init__(self, nodes: int, *, redis: bool = False) -> None:
        # Ray's own niceness of 15 leaves a job almost no time beside other tests.
        environment, self._redis = {**os.environ, "RAY_worker_niceness": "0"}, None
        if redis:
            assert REDIS is not None
            port = free_port()
            in_memory = ("--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no")
            self._redis = subprocess.Popen([REDIS, *in_memory], cwd="/", stdout=subprocess.DEVNULL)
            environment["RAY_REDIS_ADDRESS"] = f"127.0.0.1:{port}"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.clusters.ray_cluster", str(nodes)],
            cwd=REPOSITORY,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        told = self._answer()
        self.address: str = told["address"]
        self.raylets: list[int] = told["raylets"]

    def add_node(self) -> None:
        self.raylets.append(self._ask("add")["raylet"])

    def restart_gcs(self) -> None:
        """Kill the control service with SIGKILL, and start it again."""
        self._ask("gcs")

    def _ask(self, word: str) -> dict[str, Any]:
        stdin = self._process.stdin
        assert stdin is not None
        stdin.write(f"{word}\n")
        stdin.flush()
        return self._answer()

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
        if self._redis is not None:
            self._redis.kill()
            self._redis.wait()


def serve(nodes: int, words: IO[str]) -> None:
    from ray.cluster_utils import Cluster

    def pid(node: Any, kind: str) -> int:
        return int(node.all_processes[kind][0].process.pid)

    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    members = [cluster.head_node, *(cluster.add_node(**NODE) for _ in range(nodes - 1))]
    raylets = [pid(node, "raylet") for node in members]
    print(json.dumps({"address": cluster.address, "raylets": raylets}), flush=True)
    for word in words:
        if word.strip() == "gcs":
            os.kill(pid(cluster.head_node, "gcs_server"), signal.SIGKILL)
            cluster.head_node.kill_gcs_server(check_alive=False)
            cluster.head_node.start_gcs_server()
            answer = {"gcs": pid(cluster.head_node, "gcs_server")}
        else:
            answer = {"raylet": pid(cluster.add_node(**NODE), "raylet")}
        print(json.dumps(answer), flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    serve(int(sys.argv[1]), sys.stdin)
