"""A warm process whose children save and prune in an object store, to be killed at any request.

``python -m tests.store.checkpoint.remote.remote_uploader <url>``: for each line ``<step> <generation>`` on stdin it
forks a child that saves that point and then prunes. It prints the child's pid and then its exit. Forking takes
milliseconds; importing an S3 client takes a second.
"""

from __future__ import annotations

import os
import sys

import s3fs

from samebits.store.checkpoint.remote_points import RemotePointStore
from tests.store.checkpoint.remote.remote_points import prune, save
from tests.store.points import JOB, JOB_NAME

KEPT = 2

assert s3fs.S3FileSystem.protocol, "imported here, once, for all children"


def work(url: str, step: int, generation: int) -> None:
    place = RemotePointStore(url, 0, job=JOB, job_name=JOB_NAME, patience_s=5.0, leftover_age_s=0.0)
    save(place, step, generation)
    prune(place, KEPT)


def main(url: str) -> None:
    for line in sys.stdin:
        step, generation = map(int, line.split())
        pid = os.fork()
        if pid == 0:
            work(url, step, generation)
            os._exit(0)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
