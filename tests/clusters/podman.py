"""The pods of deploy/kubernetes, run by podman with all its data in a folder of the test.

A StatefulSet's pods are made as its controller makes them. An empty image with this machine's Python and this
repository mounted stands in for the real one. podman runs in its own mount and network namespace, so the machine is
unchanged.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import resource
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.clusters.namespaces import Holder
from tests.system.processes import REPOSITORY

IMAGE = "localhost/samebits-job:latest"
NETWORK, SCHEDULER_ADDRESS = "10.98.0.0/24", "10.98.0.2"
_LINKS = {"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64"}
_HYBRID = Path("/sys/fs/cgroup/unified")
_PATIENCE_S = 120.0


def missing() -> str:
    """Return briefly why no pod can be run here, or an empty string."""
    if shutil.which("podman") is None:
        return "no podman"
    try:
        with Podman() as podman:
            podman.run("run", "--rm", "--volume", "/usr:/usr:ro", IMAGE, "true")
    except (OSError, AssertionError, subprocess.SubprocessError) as error:
        return str(error)[:300]
    return ""


class Podman:
    """podman, whose pods, images and networks end with this object. A context manager."""

    def __init__(self) -> None:
        self.folder = folder = Path(tempfile.mkdtemp(prefix="pods-"))  # podman accepts no path above 50 characters
        # crun supports cgroups of either version, but not both at once: cgroups(7).
        hybrid = f"umount {_HYBRID}; " if _HYBRID.is_mount() else ""
        self._holder = Holder(
            f"mount --make-rprivate /; {hybrid}mount -t tmpfs pods /dev/shm; ip link set lo up", "--mount", "--net"
        )
        ulimits = [f"nofile={_at_most(resource.RLIMIT_NOFILE)}", f"nproc={_at_most(resource.RLIMIT_NPROC)}"]
        (folder / "containers.conf").write_text(
            f'[containers]\ndefault_ulimits = {json.dumps(ulimits)}\n[engine]\ncgroup_manager = "cgroupfs"\n'
            'events_logger = "file"\n'
        )
        self._make_image()

    def _make_image(self) -> None:
        made = io.BytesIO()
        with tarfile.open(fileobj=made, mode="w") as tar:
            for name in ("usr", "etc", "proc", "sys", "dev", "tmp", "run", "job"):
                entry = tarfile.TarInfo(name)
                entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
                tar.addfile(entry)
            for name, target in _LINKS.items():
                entry = tarfile.TarInfo(name)
                entry.type, entry.linkname = tarfile.SYMTYPE, target
                tar.addfile(entry)
        path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
        self.run("import", "--change", f"ENV PATH={path}", "-", IMAGE, given=made.getvalue())

    def run(self, *words: str, given: bytes = b"", may_fail: bool = False) -> str:
        """Run a podman command; return its output."""
        done = subprocess.run(
            [*self._entering(), *words], input=given, capture_output=True, timeout=_PATIENCE_S, check=False
        )
        said = (done.stdout + done.stderr).decode(errors="replace")
        assert may_fail or done.returncode == 0, f"podman {shlex.join(words)}: {said}"
        return said

    def status(self, *words: str) -> int:
        """Run a podman command; return its exit status."""
        done = subprocess.run([*self._entering(), *words], capture_output=True, timeout=_PATIENCE_S, check=False)
        return done.returncode

    def _entering(self) -> list[str]:
        kept = {"--root": "store", "--runroot": "run", "--tmpdir": "tmp", "--network-config-dir": "networks"}
        folders = [word for option, name in kept.items() for word in (option, str(self.folder / name))]
        settings = [f"CONTAINERS_CONF={self.folder / 'containers.conf'}", f"PATH={os.environ['PATH']}", "HOME=/nowhere"]
        inside = ["nsenter", "--target", str(self._holder.pid), "--mount", "--net", "env", "-i", *settings]
        return [*inside, "podman", "--storage-driver", "vfs", *folders]

    def play(self, objects: Sequence[Mapping[str, Any]], *options: str) -> None:
        """Start what these Kubernetes objects describe."""
        text = yaml.safe_dump_all(map(dict, objects))
        self.run("play", "kube", "--network", "samebits", *options, "-", given=text.encode())

    def __enter__(self) -> Podman:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every pod, and what podman leaves in the machine's cgroups."""
        self.run("pod", "rm", "--force", "--all", "--time", "0", may_fail=True)
        self.run("rm", "--force", "--all", "--time", "0", may_fail=True)
        self.run("network", "rm", "--force", "samebits", may_fail=True)
        self._holder.close()
        shutil.rmtree(self.folder)
        for parent in Path("/sys/fs/cgroup").glob("*/libpod_parent"):
            with contextlib.suppress(OSError):  # another podman's pods are in it
                for pod in parent.iterdir():
                    if pod.is_dir():
                        pod.rmdir()
                parent.rmdir()


def _at_most(limit: int) -> str:
    """Lower podman's limits to what this process is allowed."""
    _, most = resource.getrlimit(limit)
    wanted = 10_000 if most == resource.RLIM_INFINITY else min(10_000, most)
    return f"{wanted}:{wanted}"


def pods_of(statefulset: Mapping[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Return the pods that the StatefulSet's controller makes, in order; ``folder`` is mounted as well, at its own
    path.
    """
    name, spec = statefulset["metadata"]["name"], statefulset["spec"]
    made = []
    for index in range(spec["replicas"]):
        template = copy.deepcopy(spec["template"])
        pod = f"{name}-{index}"
        metadata = template["metadata"] | {"name": pod}
        metadata["labels"] |= {"apps.kubernetes.io/pod-index": str(index), "statefulset.kubernetes.io/pod-name": pod}
        inside = template["spec"]
        for volume in inside["volumes"]:
            volume.get("secret", {}).setdefault("optional", False)  # podman 4.3 fails without an explicit value
            if "emptyDir" in volume:
                rename_volume(inside, volume, f"{volume['name']}-{pod}")  # podman 4.3: one for all pods of that name
        inside["volumes"] += [
            {"name": claim, "persistentVolumeClaim": {"claimName": f"{claim}-{pod}"}}
            for claim in (one["metadata"]["name"] for one in spec.get("volumeClaimTemplates", ()))
        ]
        mount_machine(inside, folder)
        made.append({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": inside})
    return made


def rename_volume(spec: dict[str, Any], volume: dict[str, Any], name: str) -> None:
    """Rename a pod's volume and its mounts."""
    for container in spec["containers"]:
        for mount in container["volumeMounts"]:
            if mount["name"] == volume["name"]:
                mount["name"] = name
    volume["name"] = name


def mount_machine(spec: dict[str, Any], folder: Path) -> None:
    """Mount what an image would contain: Python, torch and this package."""
    for number, path in enumerate(dict.fromkeys(("/usr", sys.base_prefix, str(REPOSITORY), str(folder)))):
        spec["volumes"].append({"name": f"machine-{number}", "hostPath": {"path": path}})
        for container in spec["containers"]:
            container["volumeMounts"].append({"name": f"machine-{number}", "mountPath": path, "readOnly": True})


def wait_until(holds: Any, what: str, tails: Any, timeout_s: float = _PATIENCE_S) -> None:
    """Wait until the function's value is true."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"no {what} within {timeout_s:g} s\n{tails()}"
        time.sleep(0.2)
