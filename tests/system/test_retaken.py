"""Real jobs that repeat steps: ``samebits run --check`` and HIDDEN_STATE=stop."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from samebits.commands.run import check
from samebits.errors import HiddenStateError
from samebits.launcher.processes import read_pid_files, send_signal
from samebits.store.process_identity import ProcessIdentity
from tests.system.processes import Command, WarmStarter, environment_of_tests, found_below, free_port

pytestmark = pytest.mark.system

SCRIPT = """
import hashlib, os, pathlib, signal, time
import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
import samebits

samebits.init()
torch.manual_seed(1)
torch.use_deterministic_algorithms(True)
data = TensorDataset(torch.randn(120, 16), torch.randint(0, 4, (120,)))
sampler = samebits.ElasticSampler(data, shuffle=True, seed=1)
loader = DataLoader(data, batch_size=4, sampler=sampler)
net = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(), torch.nn.Linear(8, 4))
model = DistributedDataParallel(net)
optimizer = torch.optim.Adam(model.parameters())
checkpoint = samebits.CheckpointConfig(save_checkpoint_steps=7, directory="own", step_log=True)
state = samebits.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, checkpoint=checkpoint)
seen, calls = 0, 0


def weight(loss):
    global seen
    seen += 1  # moved
    return loss / seen


@samebits.elastic.run
def train(state):
    global calls
    calls += 1
    while state.epoch < 3:
        for batch, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            weight(F.cross_entropy(model(x), y)).backward()
            if "KILL" in os.environ and calls == 2 and samebits.get_rank() == 1 and not pathlib.Path("killed").exists():
                pathlib.Path("killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            sampler.record_batch(batch, 4)
            state.commit()
        state.epoch += 1
        sampler.set_epoch(state.epoch)


train(state)
weights = b"".join(one.numpy().tobytes() for one in model.state_dict().values())
print("final", state.completed_steps, hashlib.sha256(weights).hexdigest(), "calls", calls, flush=True)
"""
LINE = next(number for number, line in enumerate(SCRIPT.splitlines(), 1) if line.endswith("# moved"))
HEALTHY = SCRIPT.replace("weight(F.cross_entropy(model(x), y))", "F.cross_entropy(model(x), y)")


class Shell:
    """Runs jobs of the script, each in its own folder."""

    def __init__(self, folder: Path, warm: WarmStarter) -> None:
        self.folder = folder
        self.output = ""
        self._warm = warm

    def run(self, name: str, script: str, *options: str, before: str = "", **settings: str) -> int:
        """Run a job, and the line ``before`` in the command's process before it."""
        folder = self.folder / name
        folder.mkdir()
        (folder / "train.py").write_text(script)
        own = {"OMP_NUM_THREADS": "1", "SCHED_PORT": str(free_port()), "REGISTER_COOLDOWN": "0"}
        own |= {"TMPDIR": str(self.folder)}
        output = self.folder / f"{name}.output"
        output.touch()
        words, environment = ("run", "-n", "2", *options, "train.py"), environment_of_tests() | own | settings
        command = Command(None, words, environment, folder, output)
        if before:
            caller = self.folder / f"{name}.py"
            caller.write_text(
                f"import sys\nfrom samebits.__main__ import main\n{before}\nsys.exit(main({list(words)}))\n"
            )
            command = Command(caller, (), environment, folder, output)
        status = self._warm.start(command).wait(280)
        logs = "\n".join(log.read_text()[-3000:] for log in folder.glob("device/*.log"))
        self.output = output.read_text()
        print(f"{name}: {status}\n{self.output}\n{logs}")
        return status

    def finals(self, name: str) -> list[str]:
        """Return the last line of each worker's log, without the number of calls of the function."""
        logs = [log.read_text() for log in sorted((self.folder / name / "device").glob("worker_*.log"))]
        return [found for log in logs for found in re.findall(r"^final (\d+ \w+) calls", log, re.MULTILINE)]


@pytest.fixture
def shell(tmp_path: Path, warm: WarmStarter) -> Iterator[Shell]:
    yield Shell(tmp_path, warm)
    assert not found_below(tmp_path)


def test_a_check_ends_a_script_that_a_thread_keeps_alive(shell: Shell) -> None:
    thread = "import threading; threading.Thread(target=threading.Event().wait).start()"
    script = f"{HEALTHY.replace('state.epoch < 3', 'state.epoch < 1')}{thread}\n"
    briefly = "from samebits.commands.run import check; check._REST_S = 1.0"
    assert shell.run("thread", script, "--check", before=briefly) == 0
    assert "still running 1 s after its training function had returned, so it was stopped" in shell.output
    assert "check passed: " in shell.output


def test_check_passes_a_script_that_recovers_exactly_and_leaves_nothing_behind(shell: Shell) -> None:
    assert shell.run("healthy", HEALTHY, "--check") == 0
    equal = "5, 6, 7, 8, 9, 10, 11, 12, 16, 17, 32"  # an epoch has 15
    said = (
        f"check passed: 11 steps were taken twice with equal bits ({equal}), and 17, 18, 19, 20, 32 once more in new "
    )
    assert f"{said}processes; in steps 1 to 32, " in shell.output
    left = [one.name for one in (shell.folder / "healthy").iterdir()]
    assert left == ["train.py"], "not even the folder for the script's own checkpoints"
    assert not list(shell.folder.glob("samebits-check-*"))


def test_check_fails_a_script_with_hidden_state_and_names_its_line(shell: Shell) -> None:
    assert shell.run("hidden", SCRIPT, "--check") == HiddenStateError.exit_code
    assert f"hidden state: seen (train.py:{LINE}) changed outside the state" in shell.output
    assert "Fix: " in shell.output


def test_check_finds_in_new_processes_what_only_the_first_step_sets(shell: Shell) -> None:
    """The value is in a queue, of which the look only sees later changes."""
    first = "means.empty() and means.put(float(x.mean())); x = x - means.queue[0]"
    script = HEALTHY.replace("optimizer.zero_grad()", f"optimizer.zero_grad(); {first}")
    script = script.replace("seen, calls = 0, 0", "import queue\nmeans, seen, calls = queue.Queue(), 0, 0")
    assert shell.run("first", script, "--check") == HiddenStateError.exit_code
    assert "step 17 differed in state.model." in shell.output
    assert "when new processes continued from a checkpoint" in shell.output


def test_job_that_repeats_steps_ends_with_the_same_bits(shell: Shell) -> None:
    assert shell.run("off", HEALTHY, HIDDEN_STATE="off") == 0
    undisturbed = shell.finals("off")
    assert len(set(undisturbed)) == 1
    assert len(undisturbed) == 2

    assert shell.run("stop", HEALTHY, HIDDEN_STATE="stop") == 0
    assert shell.finals("stop") == undisturbed
    logs = "".join(log.read_text() for log in (shell.folder / "stop" / "device").glob("worker_*.log"))
    assert logs.count("calls 5\n") == 2, "four steps were repeated"

    assert shell.run("killed", HEALTHY, HIDDEN_STATE="stop", KILL="1") == 0
    assert (shell.folder / "killed" / "killed").exists()
    assert shell.finals("killed") == undisturbed
    log = (shell.folder / "killed" / "device" / "worker_0.log").read_text()
    assert "no further step is taken twice to find hidden state: the job's members have changed" in log


def test_job_with_hidden_state_ends_before_it_trains_further(shell: Shell) -> None:
    assert shell.run("hidden", SCRIPT, HIDDEN_STATE="stop") == HiddenStateError.exit_code
    assert f"hidden state: seen (train.py:{LINE}) changed outside the state" in shell.output
    assert "two runs of step 5 differ" in shell.output
    assert shell.finals("hidden") == []


@contextmanager
def endless_check(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run the check of a script that would train for a long time."""
    (folder / "train.py").write_text(SCRIPT.replace("state.epoch < 3", "state.epoch < 10**6"))
    words = [sys.executable, "-P", "-m", "samebits", "run", "--check", "-n", "2", "train.py"]
    environment = environment_of_tests() | {"TMPDIR": str(folder)}
    with subprocess.Popen(
        words, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT
    ) as command:
        yield command


def test_killed_check_ends_its_job(tmp_path: Path) -> None:
    with endless_check(tmp_path) as command:
        identities = awaited_processes(tmp_path)
        command.kill()
    outlived = [str(one) for one in identities if not one.wait_for_exit(10)]
    for one in identities:
        send_signal(one, signal.SIGKILL)
    assert outlived == []
    (left,) = tmp_path.glob("samebits-check-*")
    kept = tmp_path / "samebits-check-failed"  # logs that a failed check has kept
    kept.mkdir()
    check._remove_abandoned(tmp_path)
    assert not left.exists() and kept.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupted_check_leaves_no_folder(tmp_path: Path, number: signal.Signals) -> None:
    with endless_check(tmp_path) as command:
        awaited_processes(tmp_path)
        command.send_signal(number)
        assert command.wait(120) == 130
    assert not list(tmp_path.glob("samebits-check-*"))


def awaited_processes(folder: Path) -> list[ProcessIdentity]:
    """Return the scheduler and workers of the check that runs below this folder, once all have left their pids."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for device in folder.glob("samebits-check-*/device"):
            found = read_pid_files(device, ["scheduler", "worker_0", "worker_1"])
            if len(found) == 3:
                return list(found.values())
        time.sleep(0.05)
    raise AssertionError("the check has started no job")


def changed_late(at: int, end: str) -> tuple[str, int]:
    """Return a script that changes a value after that many steps, and the line that does."""
    change = f"if state.completed_steps == {at}:\n                scales.append(0.5)\n            "
    script = HEALTHY.replace("seen, calls = 0, 0", "scales, calls = [1.0], 0")
    script = script.replace(
        "F.cross_entropy(model(x), y).backward", "(scales[-1] * F.cross_entropy(model(x), y)).backward"
    )
    script = script.replace("optimizer.zero_grad()", f"{change}optimizer.zero_grad()")
    script = script.replace("state.commit()", f"state.commit(){end}")
    return script, next(number for number, one in enumerate(script.splitlines(), 1) if "scales.append" in one)


def test_change_shortly_before_a_loss_is_named_by_a_survivor(shell: Shell) -> None:
    end = """
            if state.completed_steps == 23 and samebits.get_rank() == 1 and not pathlib.Path("killed").exists():
                pathlib.Path("killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)"""
    script, line = changed_late(21, end)  # after the look of step 20 and the one before the save of step 21
    shell.run("one", script, "--spares", "0")
    log = (shell.folder / "one" / "device" / "worker_0.log").read_text()
    assert f"hidden state: scales (train.py:{line}) changed" in log


def test_change_that_no_process_survives_is_named_before_and_after(shell: Shell) -> None:
    end = """
            if state.completed_steps == 23 and not pathlib.Path(f"killed{samebits.get_rank()}").exists():
                state.flush()
                pathlib.Path(f"killed{samebits.get_rank()}").touch()
                while len(list(pathlib.Path().glob("killed?"))) < 2:  # a survivor would keep the value
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)"""
    script, line = changed_late(20, end)
    shell.run("all", script, "--spares", "0")
    assert "step 23 differs from the log" in shell.output, "the scale was lost"
    logs = [log.read_text() for log in (shell.folder / "all" / "device").glob("worker_*.log")]
    assert sum(f"hidden state: scales (train.py:{line}) changed" in log for log in logs) == 2, "rank 0's two processes"
