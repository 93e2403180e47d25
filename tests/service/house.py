"""A real scheduler and real agents in one test process, over loopback."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from samebits import config
from samebits.config import Settings
from samebits.core.messages import GenerationStarted, Holdings
from samebits.core.point import Point
from samebits.core.ready import JobEnded
from samebits.core.reports import FINAL, Digest
from samebits.service.agent import Agent
from samebits.service.scheduling.loop import SchedulerService
from tests.system.processes import free_port

PATIENCE_S = 30.0
NUMERICS = (("threads", "1"),)


def final(step: int, generation: int = 1) -> Digest:
    """Return the digest of the state in which every worker ends."""
    return Digest(Point(step, generation), FINAL, b"equal")


def remove_folder(folder: Path) -> None:
    """Remove the folder, repeatedly: the scheduler of a running job creates new files meanwhile."""
    until_s = time.monotonic() + PATIENCE_S
    while folder.exists():
        with contextlib.suppress(OSError):
            shutil.rmtree(folder)
        assert time.monotonic() < until_s, f"{folder} is written faster than it is removed"


class House:
    """One job's settings, its scheduler threads and its agents."""

    def __init__(self, path: Path, workers: int, **environ: str) -> None:
        self.path = path
        self.environ = {
            "WORKER_NUM": str(workers),
            "SCHED_PORT": str(free_port()),
            "RECOVERY_PATH": str(path / "recovery"),
            "ENABLE_RECOVERY": "1",
            "REGISTER_COOLDOWN": "0",
            "HEARTBEAT_INTERVAL": "0.1",
            "NODE_TIMEOUT": "1",
            **environ,
        }
        self.pool = ThreadPoolExecutor(max_workers=32)
        self.agents: list[Agent] = []
        self.service: SchedulerService | None = None

    def settings(self, role: str, node: str = "") -> Settings:
        settings, _ = config.read({**self.environ, "ROLE": role, "NODE_ID": node})
        return settings

    def scheduler(self) -> Future[JobEnded]:
        """Start serving; the future holds the result."""
        self.service = SchedulerService(self.settings("scheduler"))
        return self.pool.submit(self.service.serve)

    def agent(self, node: str) -> Agent:
        agent = Agent(self.settings("worker", node), "test", "cpu")
        self.agents.append(agent)
        return agent

    def seated(self, *nodes: str) -> list[Agent]:
        """Return agents of these nodes, all admitted."""
        agents = [self.agent(node) for node in nodes]
        list(self.pool.map(lambda agent: agent.register(), agents, timeout=PATIENCE_S))
        return agents

    def generation(self, *agents: Agent) -> list[GenerationStarted]:
        """Let all agents enter and get their places."""

        def enter(agent: Agent) -> GenerationStarted:
            place = agent.enter(Holdings((), False, NUMERICS))
            assert isinstance(place, GenerationStarted)
            return place

        return list(self.pool.map(enter, agents, timeout=PATIENCE_S))

    def mapped(self, agents: list[Agent], places: list[GenerationStarted]) -> list[list[bytes]]:
        """Let all agents publish and get the address map."""

        def meet(pair: tuple[Agent, GenerationStarted]) -> list[bytes]:
            agent, place = pair
            agent.publish(place.generation, b"address of %d" % place.rank)
            addresses = list(agent.address_map(place.generation))
            agent.trains(place.generation)
            return addresses

        return list(self.pool.map(meet, zip(agents, places, strict=True), timeout=PATIENCE_S))

    def close(self) -> None:
        for agent in self.agents:
            agent.leave(on_purpose=True, text="the test is over")
        if self.service is not None:
            self.service.stop("the end of the test")
        self.pool.shutdown(wait=True)
        assert not [thread for thread in threading.enumerate() if thread.name == "samebits-agent"]
