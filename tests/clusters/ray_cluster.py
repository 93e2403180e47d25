"""Run a real Ray cluster of several raylets on this machine, in a process of its own.

``python -m tests.clusters.ray_cluster 3`` prints a JSON object with the cluster's address and the pids of its raylets.
Each line on its standard input prints another: ``add`` adds a node, ``gcs`` kills the control service (GCS) and starts
it again. The cluster ends with its standard input. With RAY_REDIS_ADDRESS, the GCS keeps its tables in that Redis.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import IO, Any

from tests.system.processes import REPOSITORY, free_port

HOSTS = 3
"""Number of hosts of the tests' jobs."""
REDIS = shutil.which("redis-server")
NODE: Mapping[str, Any] = {"num_cpus": 1, "object_store_memory": 80_000_000}
SETTINGS = {
    "RAY_worker_niceness": "0",  # Ray's own 15 leaves a job almost no time beside other tests
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_worker_register_timeout_seconds": "300",
}
START_S = 300
"""Seconds for a node's start on a busy machine; Ray's own limit of 30 s is fixed."""
AGENT_PORTS = ("metrics_agent_port", "metrics_export_port", "runtime_env_agent_port", "dashboard_agent_listen_port")


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
        environment, self._redis = {**os.environ, **SETTINGS}, None
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


def node() -> dict[str, Any]:
    """Return the arguments of another node.

    A raylet that is not told its agent's ports ends if the agent has not chosen them within 30 s.
    """
    return {**NODE, **{name: free_port() for name in AGENT_PORTS}}


def wait_longer() -> None:
    """Let Ray wait START_S seconds for a node that it has started, and tell a raylet the last of its agent's ports."""
    services = importlib.import_module("ray._private.services")
    get_node, wait_for_node, start = services.get_node, services.wait_for_node, services.start_ray_process

    def start_with_port(command: list[str], *more: Any, **options: Any) -> Any:
        port = re.search(r"--listen-port=(\d+)", " ".join(command))
        told = [] if port is None else [f"--dashboard_agent_listen_port={port[1]}"]
        return start([*command, *told], *more, **options)

    def get_node_in_time(*where: Any) -> Any:
        deadline_s = time.monotonic() + START_S
        while True:
            try:
                return get_node(*where)
            except RuntimeError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.2)

    services.get_node, services.start_ray_process = get_node_in_time, start_with_port
    services.wait_for_node = lambda address, store, _timeout: wait_for_node(address, store, START_S)


def serve(nodes: int, words: IO[str]) -> None:
    from ray.cluster_utils import Cluster

    wait_longer()

    def pid(member: Any, kind: str) -> int:
        return int(member.all_processes[kind][0].process.pid)

    cluster = Cluster(initialize_head=True, head_node_args={**node(), "include_dashboard": False})
    members = [cluster.head_node, *(cluster.add_node(**node()) for _ in range(nodes - 1))]
    raylets = [pid(one, "raylet") for one in members]
    print(json.dumps({"address": cluster.address, "raylets": raylets}), flush=True)
    for word in words:
        if word.strip() == "gcs":
            os.kill(pid(cluster.head_node, "gcs_server"), signal.SIGKILL)
            cluster.head_node.kill_gcs_server(check_alive=False)
            cluster.head_node.start_gcs_server()
            answer = {"gcs": pid(cluster.head_node, "gcs_server")}
        else:
            answer = {"raylet": pid(cluster.add_node(**node()), "raylet")}
        print(json.dumps(answer), flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    serve(int(sys.argv[1]), sys.stdin)
