"""The object stores that remote points are tested with: memory:// and an S3 server on loopback."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import fsspec
import pytest
import s3fs

from samebits.store.checkpoint.remote_points import RemotePointStore
from tests.store.checkpoint.remote.s3_server import BUCKET, S3Server
from tests.store.points import JOB, JOB_NAME


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder of an object store for one test, and its objects by name."""

    url: str

    def place(self, slot: int = 0, *, job: str = JOB, patience_s: float = 5.0, **more: Any) -> RemotePointStore:
        return RemotePointStore(self.url, slot, job=job, job_name=JOB_NAME, patience_s=patience_s, **more)

    def _files(self) -> tuple[Any, str]:
        files, root = fsspec.core.url_to_fs(self.url)
        files.invalidate_cache()
        return files, root

    def names(self) -> list[str]:
        files, root = self._files()
        return sorted(name.removeprefix(root).strip("/") for name in files.find(root))

    def get(self, name: str) -> bytes:
        files, root = self._files()
        return bytes(files.cat_file(f"{root}/{name}"))

    def put(self, name: str, data: bytes) -> None:
        files, root = self._files()
        files.pipe_file(f"{root}/{name}", data)

    def delete(self, name: str) -> None:
        files, root = self._files()
        files.rm_file(f"{root}/{name}")


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    server = S3Server()
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()  # instances of the previous server
    yield server
    server.check_credentials(False)
    server.close()


@pytest.fixture
def bucket(s3: S3Server) -> Folder:
    return Folder(f"s3://{BUCKET}/job")


HDFS = "TESTS_HDFS"
"""Environment variable with the URL of a folder in HDFS; ``python -m tests.hdfs`` sets it."""


@pytest.fixture(params=["memory", "s3", *(["hdfs"] if HDFS in os.environ else [])])
def folder(request: pytest.FixtureRequest) -> Folder:
    """Run the test once for each store."""
    if request.param == "memory":
        return Folder(f"memory://{uuid.uuid4().hex}/job")
    if request.param == "hdfs":
        return Folder(f"{os.environ[HDFS]}/{uuid.uuid4().hex}/job")
    found: Folder = request.getfixturevalue("bucket")
    return found
