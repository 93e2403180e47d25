"""Checkpoints in a real HDFS: ``python -m tests.hdfs JARS`` starts a namenode and a datanode and runs the tests.

JARS is a folder with Hadoop's jars, such as ``deps/jars`` of the source archive of pyspark 2.4.8, which has Hadoop
2.7.3. Java 8 to 17 and the package hdfs-native are needed as well. It is not part of the suite, whose machines have no
Hadoop. All files are in a separate folder, and everything ends with this command.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.store.checkpoint.conftest import HDFS
from tests.system.processes import REPOSITORY, free_port

PATIENCE_S = 180.0
_SERVER = "org.apache.hadoop.hdfs.server"
_OPENED = ("java.base/java.lang", "java.base/java.nio", "java.base/sun.nio.ch")
TESTS = ("tests/store/checkpoint/remote/test_remote_points.py", "tests/store/checkpoint/remote/test_remote_kill.py")
JOB_TEST = "tests/system/on_hdfs.py"


class Hadoop:
    """One namenode and one datanode. A context manager.

    Args:
        jars: the folder of Hadoop's jars.
        folder: for all their files.
    """

    def __init__(self, jars: Path, folder: Path) -> None:
        self._jars, self._folder = jars, folder
        self._started: list[subprocess.Popen[bytes]] = []
        self.url = f"hdfs://127.0.0.1:{free_port()}"
        self._write_settings()

    def _write_settings(self) -> None:
        ports = {f"dfs.{name}": f"127.0.0.1:{free_port()}" for name in (
            "namenode.http-address", "datanode.address", "datanode.http.address", "datanode.ipc.address"
        )}  # fmt: skip
        # Without WebHDFS: it needs jersey 1, which is not among these jars; the client speaks the namenode's protocol.
        hdfs = {"dfs.replication": "1", "dfs.webhdfs.enabled": "false", "dfs.permissions.enabled": "false", **ports}
        core = {"fs.defaultFS": self.url, "hadoop.tmp.dir": str(self._folder / "data")}
        for name, values in (("core", core), ("hdfs", hdfs)):
            rows = "".join(
                f"<property><name>{key}</name><value>{text}</value></property>" for key, text in values.items()
            )
            (self._folder / f"{name}-site.xml").write_text(f"<configuration>{rows}</configuration>")
        for page in ("hdfs", "datanode", "static"):  # the jar has none, and the servers do not start without
            (self._folder / "webapps" / page / "WEB-INF").mkdir(parents=True)
            (self._folder / "webapps" / page / "WEB-INF" / "web.xml").write_text("<web-app/>")

    def _java(self, program: str, *words: str) -> list[str]:
        opened = [word for name in _OPENED for word in ("--add-opens", f"{name}=ALL-UNNAMED")]
        opened += ["--add-exports", "java.security.jgss/sun.security.krb5=ALL-UNNAMED"]
        return ["java", "-Xmx256m", *opened, "-cp", f"{self._folder}:{self._jars}/*", f"{_SERVER}.{program}", *words]

    def __enter__(self) -> Hadoop:
        subprocess.run(
            self._java("namenode.NameNode", "-format", "-nonInteractive"),
            check=True,
            capture_output=True,
            timeout=PATIENCE_S,
        )
        for name, program in (("namenode", "namenode.NameNode"), ("datanode", "datanode.DataNode")):
            with (self._folder / f"{name}.log").open("wb") as log:
                self._started.append(subprocess.Popen(self._java(program), stdout=log, stderr=log))
        self._wait()
        return self

    def _wait(self) -> None:
        """Wait until a file can be written."""
        from hdfs_native import Client

        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                with Client(self.url).create("/ready") as file:
                    file.write(b"ready")
                return
            except Exception as error:  # no server listens yet, or no datanode has registered
                if time.monotonic() > deadline or any(one.poll() is not None for one in self._started):
                    tails = [log.read_text()[-2000:] for log in sorted(self._folder.glob("*.log"))]
                    raise SystemExit(f"HDFS does not serve: {error}\n" + "\n".join(tails)) from None
                time.sleep(0.5)

    def __exit__(self, *_: object) -> None:
        for one in self._started:
            one.terminate()
            one.wait(PATIENCE_S)


def main() -> int:
    """Run the tests; return pytest's status."""
    parser = argparse.ArgumentParser(prog="python -m tests.hdfs", description=__doc__)
    parser.add_argument("jars", type=Path, help="the folder of Hadoop's jars")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hdfs-") as folder, Hadoop(options.jars.resolve(), Path(folder)) as hadoop:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS, JOB_TEST, "-k", "hdfs"]
        environment = os.environ | {HDFS: f"{hadoop.url}/tests"}
        return subprocess.run(command, cwd=REPOSITORY, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
