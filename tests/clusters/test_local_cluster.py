"""docs/tutorials/three-hosts.md, typed block by block in one shell, on real hosts of ``samebits cluster``.

Only the number of steps is smaller. Between two blocks, the test does what the page asks of its reader: repeat
`samebits status` until it shows what the page says.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from samebits.hosts import local_cluster
from tests.system.processes import REPOSITORY, environment_of_tests, found_below, signal_process
from tests.test_readme import blocks_of

pytestmark = [pytest.mark.system, pytest.mark.thorough, pytest.mark.timeout(1500)]

PAGE = "docs/tutorials/three-hosts.md"
STEPS = "1000"
STATUS = "samebits cluster exec 0 -- samebits status"
TRAINS = r"training · step [1-9]\S* · 3/3 workers"
WAIT_S = 600.0


class Typist:
    """A shell in which a user types."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._log = folder / "shell.log"
        self._environment = environment_of_tests()
        self._environment["PATH"] = f"{Path(sys.executable).parent}:{self._environment['PATH']}"
        with self._log.open("wb") as log:
            self._shell = subprocess.Popen(
                ["bash"], cwd=folder, env=self._environment, stdin=subprocess.PIPE, stdout=log, stderr=log, text=True
            )
        self._typed = 0

    def type(self, block: str) -> str:
        """Type a block, wait until the shell has run it, and return the shell's output since the last one."""
        before = len(self.text)
        self._typed += 1
        assert self._shell.stdin is not None
        self._shell.stdin.write(f'{block.replace("3000", STEPS)}\necho "typed {self._typed}: $?"\n')
        self._shell.stdin.flush()
        done = re.compile(rf"typed {self._typed}: (\d+)\n")
        deadline_s = time.monotonic() + WAIT_S
        while (found := done.search(self.text)) is None:
            assert time.monotonic() < deadline_s, f"{block}\n{self.text}"
            time.sleep(0.1)
        assert found[1] == "0", self.text
        return self.text[before : found.start()]

    def until(self, *patterns: str) -> None:
        """Repeat the page's status command until it shows all patterns."""
        deadline_s, text = time.monotonic() + WAIT_S, ""
        while not all(re.search(pattern, text, re.MULTILINE) for pattern in patterns):
            assert time.monotonic() < deadline_s, f"{patterns}\n{text}\n{self.text}"
            text = subprocess.run(
                STATUS.split(), cwd=self._folder, env=self._environment, capture_output=True, text=True, check=False
            ).stdout

    @property
    def text(self) -> str:
        return self._log.read_text()

    def close(self) -> None:
        assert self._shell.stdin is not None
        self._shell.stdin.close()
        self._shell.kill()
        self._shell.wait()


@pytest.fixture
def typist(tmp_path: Path) -> Iterator[Typist]:
    if problem := local_cluster.refusal():
        pytest.skip(problem)
    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    typist = Typist(tmp_path)
    try:
        yield typist
    finally:
        typist.close()
        left = [one for one in found_below(tmp_path) if not one.wait_for_exit(30.0)]
        for one in left:
            signal_process(one, signal.SIGKILL)
    assert not left


def hosts_on(page: str) -> set[str]:
    """Return the hosts of the workers that the page shows."""
    browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    browser.open(page, timeout=60).close()
    with browser.open(f"{page.partition('?')[0]}api/everything", timeout=60) as answer:
        return set(re.findall(r'"host": ?"([^"]+)"', answer.read().decode()))


def test_page_typed_word_for_word_ends_with_the_bits_of_one_machine(typist: Typist, tmp_path: Path) -> None:
    _, up, run, status, cut, heal, kill, restart, undisturbed, compare, down = blocks_of(PAGE, language="")
    page = re.search(r"the page is at (\S+)", typist.type(up))
    assert page is not None
    typist.type(run)
    assert status.strip() == STATUS
    typist.until(TRAINS)
    assert hosts_on(page[1]) == {"host0", "host1", "host2"}
    assert "host 2 was cut off" in typist.type(cut)
    typist.until(TRAINS, "^2 +3 +alive", "^– +2 +lost .* on host2 +silent for 5 s")
    assert "host 2 reaches the other hosts again" in typist.type(heal)
    typist.until("^spare +2 +alive .* on host2 +warm")
    assert "every process on host 1 was killed" in typist.type(kill)
    typist.until(TRAINS, "^1 +2 +alive .* on host2", "^– +1 +lost .* on host1")
    assert "host 1 was started" in typist.type(restart)
    assert f"job finished at step {STEPS}" in typist.type(undisturbed)
    results = typist.type(compare)
    assert re.fullmatch(rf" +6 step={STEPS} loss=\S+ accuracy=\S+ sha256=\w{{64}}\n", results), results
    assert f"job finished at step {STEPS}" in (tmp_path / "host0.txt").read_text()
    typist.type(down)
    assert not (tmp_path / "cluster").exists()
