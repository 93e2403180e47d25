"""Hosts to run a job on, with a check that nothing is left."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clusters import namespaces, ray_cluster
from tests.clusters.hosts import HostsJob
from tests.clusters.namespaces import Switch
from tests.clusters.ray_cluster import RayCluster
from tests.system.conftest import has_relay, new_job, undisturbed, watched
from tests.system.job import JobFolder
from tests.system.processes import WarmStarter

__all__ = ["has_relay", "new_job", "undisturbed", "watched"]


@pytest.fixture
def has_ray() -> None:
    if not ray_cluster.is_installed():
        pytest.skip("Ray is not installed: pip install 'samebits[ray]'")


@pytest.fixture
def cluster(has_ray: None) -> Iterator[RayCluster]:
    """Return a Ray cluster with a node for each host of a job."""
    made = RayCluster(ray_cluster.HOSTS)
    yield made
    made.close()


@pytest.fixture(scope="session")
def can_have_hosts() -> None:
    why_not = namespaces.missing()
    if why_not:
        pytest.skip(f"hosts cannot be made on this machine: {why_not}")


@pytest.fixture
def new_switch(can_have_hosts: None) -> Iterator[Callable[..., Switch]]:
    """Return a factory of switches with hosts of these names."""
    switches: list[Switch] = []

    def make(*names: str, networks: int = 1) -> Switch:
        switch = Switch(networks)
        switches.append(switch)
        for name in names:
            switch.host(name)
        return switch

    yield make
    for switch in switches:
        switch.close()


@pytest.fixture
def new_hosts_job(
    tmp_path: Path, warm: WarmStarter, new_switch: Callable[..., Switch], watched: Callable[[JobFolder], None]
) -> Callable[..., HostsJob]:
    """Return a factory of jobs of three ranks on three hosts, or on those of ``switch``."""
    numbers = itertools.count()

    def make(*args: str, switch: Switch | None = None, **options: Any) -> HostsJob:
        folder = tmp_path / f"job{next(numbers)}"
        folder.mkdir()
        job = HostsJob(folder, warm, switch or new_switch("a", "b", "c"), args=args, **options)
        watched(job)
        return job

    return make
