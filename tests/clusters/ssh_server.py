"""A real sshd as a plain process on a free port with its own keys; the machine's configuration is not read."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

from tests.system.processes import PATIENCE, free_port

SSHD = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")
START_S = 60.0 * PATIENCE
SERVER = """\
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/client_key.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
"""
CLIENT = """\
Host {names}
HostName 127.0.0.1
Port {port}
IdentityFile {folder}/client_key
IdentitiesOnly yes
StrictHostKeyChecking no
UserKnownHostsFile {folder}/known_hosts
LogLevel ERROR
"""


def missing() -> str:
    """Return what this machine lacks for it, or an empty string."""
    if SSHD is None or shutil.which("ssh") is None or shutil.which("ssh-keygen") is None:
        return "no sshd, ssh and ssh-keygen (Debian's openssh-server and openssh-client)"
    return "" if os.geteuid() == 0 else "sshd lets nobody in without root"


class SshServer:
    """Each of these names leads to it with ``ssh -F config``; ``config`` is the path."""

    def __init__(self, folder: Path, *names: str) -> None:
        folder.mkdir()
        self.config, port = folder / "config", free_port()
        for key in ("host_key", "client_key"):
            words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)]
            subprocess.run(words, check=True, stdin=subprocess.DEVNULL, timeout=START_S)
        (folder / "sshd_config").write_text(SERVER.format(port=port, folder=folder))
        self.config.write_text(CLIENT.format(names=" ".join(names), port=port, folder=folder))
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd's privilege separation needs an empty folder
        self._log = (folder / "sshd.log").open("ab")
        words = [str(SSHD), "-D", "-e", "-f", str(folder / "sshd_config")]
        self._process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log)
        deadline = time.monotonic() + START_S
        while not _listens(port):
            assert self._process.poll() is None and time.monotonic() < deadline, (folder / "sshd.log").read_text()
            time.sleep(0.05)

    def close(self) -> None:
        """Accept no more connections; existing ones end with the processes in them."""
        self._process.terminate()
        self._process.wait(START_S)
        self._log.close()


def _listens(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0
