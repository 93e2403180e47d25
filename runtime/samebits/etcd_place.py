"""Where a job's journal is in etcd, and the credentials for etcd. Opens no connection."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from samebits.scheduler_hosts import NotHostsError, SchedulerAddress, listed
from samebits.urls import has_password

SCHEME = "etcd://"
USUAL_PORT = 2379
_KEYS = re.compile(r"(/[A-Za-z0-9._-]{1,100}){1,8}")


@dataclass(frozen=True, slots=True)
class EtcdPlace:
    """The members of an etcd cluster, and the prefix of one job's keys, such as ``/jobs/digits``."""

    members: tuple[SchedulerAddress, ...]
    prefix: str

    def __str__(self) -> str:
        return f"{SCHEME}{','.join(map(str, self.members))}{self.prefix}"

    @classmethod
    def parse(cls, text: str) -> EtcdPlace:
        """Parse a URL such as ``etcd://h1:2379,h2:2379,h3/jobs/name``.

        Raises:
            ValueError: ``text`` is not in this form; the message says why.
        """
        if has_password(text):
            raise ValueError("credentials do not belong in a URL, which is written to logs; put them in ETCDCTL_USER")
        members, _, path = text.removeprefix(SCHEME).partition("/")
        prefix = f"/{path.rstrip('/')}"
        if not _KEYS.fullmatch(prefix):
            raise ValueError(f"expected the job's own prefix, such as /jobs/digits, after the hosts, found {prefix!r}")
        try:
            named = listed(members)
        except NotHostsError as error:
            raise ValueError(str(error)) from None
        return cls(tuple(SchedulerAddress(host, port or USUAL_PORT) for host, port in named), prefix)


@dataclass(frozen=True, slots=True)
class EtcdAccess:
    """A client's credentials, from etcdctl's own variables: the files for TLS, and a user with a password.

    TLS is used if ``authority`` or ``certificate`` is set.
    """

    authority: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    user: str = ""
    password: str = field(default="", repr=False)

    @property
    def is_encrypted(self) -> bool:
        """Return whether connections use TLS."""
        return self.authority is not None or self.certificate is not None
