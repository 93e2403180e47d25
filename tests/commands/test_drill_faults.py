"""A drill's faults, each injected into a small process: what it reports is what happened."""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from samebits.commands.drill import inside, orders
from samebits.commands.drill.command import free_port
from samebits.commands.drill.faults import (
    _GIVERS,
    RLIMIT_AS,
    MemoryLimit,
    Tools,
    _flip_in,
    _remove,
    _truncate,
    flip_bit,
    group_above,
)
from samebits.commands.drill.orders import DrillOrders, ImpossibleError, Preloaded
from samebits.commands.drill.partition import INSIDE, OUTSIDE, PortForward
from samebits.commands.drill.plan import AwaitedEvent, DrillFault, host_of
from samebits.errors import CheckpointError
from samebits.launcher.spawning import execute
from samebits.store import checkpoint
from samebits.store.process_identity import ProcessIdentity
from tests.store.points import save

PATIENCE_S = 60.0
ALIVE = "import sys\nprint('there', flush=True)\n"


@contextmanager
def process(code: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], ProcessIdentity]]:
    """Start a Python process that leads a session; return once it has printed a line."""
    started = subprocess.Popen(
        [sys.executable, "-c", ALIVE + code],
        env={**os.environ, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert started.stdout is not None
        assert started.stdout.readline() == "there\n"
        yield started, ProcessIdentity.of_child(started.pid)
    finally:
        started.kill()
        started.communicate()


LOOP = "import time\nwhile True:\n    time.sleep(0.01)\n"


def test_every_fault_has_an_implementation_and_a_description() -> None:
    assert _GIVERS.keys() == set(DrillFault)
    assert len({fault.text for fault in DrillFault}) == len(DrillFault)


def test_sigint_awaits_no_loss_because_workers_ignore_it(tmp_path: Path) -> None:
    program = "import signal; print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)"
    with (tmp_path / "worker.log").open("wb") as log:
        os.waitpid(execute([sys.executable, "-c", program], dict(os.environ), tmp_path, log.fileno()), 0)
    ignores = (tmp_path / "worker.log").read_text() == "True\n"
    assert DrillFault.INTERRUPT.notice is (AwaitedEvent.NOTHING if ignores else AwaitedEvent.LOSS)


def test_host_is_one_half_of_the_members() -> None:
    members = ["worker_0", "worker_1", "worker_2"]
    assert (host_of(members, 0.2), host_of(members, 0.7)) == (members[:2], members[2:])
    assert host_of(members[:1], 0.9) == members[:1]


# ---- orders


def test_process_carries_out_an_order_and_reports_it(tmp_path: Path) -> None:
    orders = DrillOrders(tmp_path / "inside")
    with process(LOOP, PYTHONPATH=str(orders.folder)) as (_, identity):
        assert abs(float(orders.give(identity, "clock")) - time.time()) < PATIENCE_S
        assert list(orders.folder.glob("order-*")) == []


def test_process_that_does_not_listen_is_not_signalled(tmp_path: Path) -> None:
    orders = DrillOrders(tmp_path / "inside")
    with process(LOOP) as (started, identity):
        with pytest.raises(ImpossibleError, match="takes no orders"):
            orders.give(identity, "clock")
        assert started.poll() is None


def test_signal_without_an_order_does_nothing(tmp_path: Path) -> None:
    orders = DrillOrders(tmp_path / "inside")
    with process(LOOP, PYTHONPATH=str(orders.folder)) as (started, identity):
        os.kill(started.pid, signal.SIGRTMAX)
        (orders.folder / f"order-{started.pid}.json").write_text("no order")
        os.kill(started.pid, signal.SIGRTMAX)
        assert float(orders.give(identity, "clock"))


def test_other_sitecustomize_is_loaded_too(tmp_path: Path) -> None:
    orders = DrillOrders(tmp_path / "inside")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/sitecustomize.py").write_text("import builtins\nbuiltins.theirs = 7\n")
    path = f"{orders.folder}:{tmp_path / 'theirs'}"
    done = subprocess.run(
        [sys.executable, "-c", "print(theirs)"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "7\n"


def test_held_interpreter_runs_no_other_thread(tmp_path: Path) -> None:
    code = """
import threading, time
gaps = [0.0]
def tick():
    before = time.monotonic()
    while gaps[0] < 1.5:
        time.sleep(0.01)
        now = time.monotonic()
        gaps[0] = max(gaps[0], now - before)
        before = now
threading.Thread(target=tick).start()
print("ticks", flush=True)
while gaps[0] < 1.5:
    time.sleep(0.01)
print("held", flush=True)
"""
    orders = DrillOrders(tmp_path / "inside")
    with process(code, PYTHONPATH=str(orders.folder)) as (started, identity):
        assert started.stdout is not None
        assert started.stdout.readline() == "ticks\n"
        assert orders.give(identity, "hold", seconds=2) == "held the interpreter for 2 s"
        assert started.stdout.readline() == "held\n"


def test_process_that_takes_all_its_memory_dies_of_that(tmp_path: Path) -> None:
    orders = DrillOrders(tmp_path / "inside")
    with process(LOOP, PYTHONPATH=str(orders.folder)) as (started, identity):
        assert orders.give(identity, "eat", limit=RLIMIT_AS) == "allocated beyond RLIMIT_AS"
        _, errors = started.communicate(timeout=PATIENCE_S)
        assert started.returncode == 1
        assert errors.rstrip().endswith("MemoryError")


class States:
    """The part of a state that determines a commit's wait."""

    uncommitted_steps = 0

    def __init__(self) -> None:
        self.completed_steps = 0
        self.is_lost = False

    def check_host_updates(self) -> None:
        if self.is_lost:
            raise ConnectionError("a member is lost")


def test_rank_waits_at_the_commit_until_released_or_a_member_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders = DrillOrders(tmp_path / "inside")
    monkeypatch.setattr(inside, "HERE", orders.folder)
    kind = type("Held", (States,), {"check_host_updates": States.check_host_updates})
    inside._wait_at_commits(kind)
    state, left, me = kind(), threading.Semaphore(0), os.getpid()

    def commit(step: int) -> None:
        state.completed_steps = step
        with suppress(ConnectionError):
            state.check_host_updates()
        left.release()

    def committing(step: int) -> None:
        threading.Thread(target=commit, args=(step,), daemon=True).start()

    def wait_until_held(step: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while orders.held([me, 1]) != {me: step}:
            assert time.monotonic() < deadline
            time.sleep(0.001)

    orders.hold_at(20)
    commit(19)
    assert left.acquire(timeout=PATIENCE_S) and orders.held([me]) == {}, "it is not there yet"
    committing(21)
    wait_until_held(21)
    assert not left.acquire(blocking=False)
    orders.hold_at(30)
    assert left.acquire(timeout=PATIENCE_S) and orders.held([me]) == {}, "released, up to the next one"
    committing(30)
    wait_until_held(30)
    state.is_lost = True
    assert left.acquire(timeout=PATIENCE_S) and orders.held([me]) == {}, "a loss is raised at once"
    state.is_lost = False
    monkeypatch.setattr(inside, "MOST_HELD_S", 0.05)
    commit(30)
    assert left.acquire(timeout=PATIENCE_S), "the drill is gone"
    commit(31)
    assert left.acquire(timeout=PATIENCE_S), "which is noticed once"


def test_one_bit_of_a_parameter_is_flipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(inside, "HERE", tmp_path)
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(500)))  # more than any other module here
    before = torch.cat([one.detach().reshape(-1).clone() for one in model.parameters()]).view(torch.uint8)
    inside._flip({"draw": 0.37})
    after = torch.cat([one.detach().reshape(-1) for one in model.parameters()]).view(torch.uint8)
    changed = [int(one) ^ int(other) for one, other in zip(before, after, strict=True) if one != other]
    assert [one.bit_count() for one in changed] == [1]
    assert " became " in (tmp_path / f"did-{os.getpid()}.txt").read_text()


@pytest.mark.parametrize(("pending", "said"), [(False, "raised RuntimeError"), (True, "was sent a pending RuntimeE")])
def test_exception_ends_the_script_wherever_it_is(tmp_path: Path, pending: bool, said: str) -> None:
    orders = DrillOrders(tmp_path / "inside")
    with process(LOOP, PYTHONPATH=str(orders.folder)) as (started, identity):
        assert orders.give(identity, "raise", pending=pending).startswith(said)
        _, errors = started.communicate(timeout=PATIENCE_S)
        assert started.returncode == 1
        assert "RuntimeError" in errors.splitlines()[-1]


def test_hanging_main_thread_leaves_the_others_running(tmp_path: Path) -> None:
    code = """
import threading, time
def answer():
    input()
    print("runs", flush=True)
threading.Thread(target=answer, daemon=True).start()
print("waits", flush=True)
while True:
    time.sleep(0.01)
"""
    orders = DrillOrders(tmp_path / "inside")
    with process(code, PYTHONPATH=str(orders.folder)) as (started, identity):
        assert started.stdin is not None and started.stdout is not None
        assert started.stdout.readline() == "waits\n"
        assert orders.give(identity, "hang") == "sleeps in its main thread"
        started.stdin.write("\n")
        started.stdin.flush()
        assert started.stdout.readline() == "runs\n"
        assert (orders.folder / f"did-{identity.pid}.txt").exists()


class Training:
    """A linear model with more parameters than any other module here, and an optimizer with more groups."""

    def __init__(self, torch: Any) -> None:
        self.model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(500)))
        self.optimizer = torch.optim.SGD([{"params": layer.parameters()} for layer in self.model], lr=0.5)
        self.rows = torch.ones(1, 2)

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.model[0](self.rows).sum().backward()


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Training:
    monkeypatch.setattr(inside, "HERE", tmp_path)
    return Training(pytest.importorskip("torch"))


def said(tmp_path: Path) -> str:
    return (tmp_path / f"did-{os.getpid()}.txt").read_text()


def test_stale_parameter_returns_once_a_step_has_changed_it(training: Training, tmp_path: Path) -> None:
    first = training.model[0].weight
    old, bias = first.detach().clone(), training.model[0].bias.detach().clone()
    inside._stale({"draw": 0.0})
    assert said(tmp_path).startswith("0.weight is set back to its current value")
    (thread,) = [one for one in threading.enumerate() if one.name == "drill-stale"]
    training.backward()
    training.optimizer.step()
    thread.join(PATIENCE_S)
    assert not thread.is_alive() and first.equal(old)
    assert not training.model[0].bias.equal(bias), "the rest is as the step left it"


def test_one_bit_of_a_gradient_changes_in_one_step_only(training: Training, tmp_path: Path) -> None:
    training.backward()
    gradients = [one.grad.clone() for one in training.model[0].parameters()]
    inside._gradient({"draw": 0.3})
    assert said(tmp_path) == "one bit of a reduced gradient changes before the next step"
    training.optimizer.step()
    after = [one.grad for one in training.model[0].parameters()]
    assert sum(not one.equal(other) for one, other in zip(gradients, after, strict=True)) == 1
    again = [one.clone() for one in after]
    training.optimizer.step()
    assert all(one.equal(other) for one, other in zip(again, after, strict=True))


@pytest.fixture
def sharded(training: Training) -> Iterator[Training]:
    """Cut the first layer into the shards of a mesh of one rank."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for layer in training.model:
            fully_shard(layer, mesh=mesh)
        training.optimizer = torch.optim.SGD([{"params": [one]} for one in training.model.parameters()], lr=0.5)
        yield training
    finally:
        dist.destroy_process_group()


def test_a_sharded_parameter_and_its_gradient_are_corrupted_in_the_ranks_own_shard(
    sharded: Training, tmp_path: Path
) -> None:
    shard = sharded.model[0].weight.to_local()
    old = shard.detach().clone()
    inside._flip({"draw": 0.0})
    assert said(tmp_path).endswith(" of 0.weight") and (shard != old).sum() == 1
    flipped = shard.detach().clone()
    inside._stale({"draw": 0.0})
    sharded.backward()
    gradients = [one.grad.to_local().clone() for one in sharded.model[0].parameters()]
    inside._gradient({"draw": 0.3})
    (thread,) = [one for one in threading.enumerate() if one.name == "drill-stale"]
    sharded.optimizer.step()
    thread.join(PATIENCE_S)
    assert not thread.is_alive() and shard.equal(flipped)
    after = [one.grad.to_local() for one in sharded.model[0].parameters()]
    assert sum(not one.equal(other) for one, other in zip(gradients, after, strict=True)) == 1


def test_gradient_changes_in_the_optimizer_that_a_wrapper_without_hooks_wraps(training: Training) -> None:
    import torch

    class Wrapper(torch.optim.Optimizer):
        def __init__(self, wrapped: Any) -> None:  # as Accelerate's, which never calls the base class's
            self.param_groups = wrapped.param_groups * 2

    wrapper = Wrapper(training.optimizer)
    training.backward()
    before = [one.grad.clone() for one in training.model[0].parameters()]
    inside._gradient({"draw": 0.3})
    training.optimizer.step()
    after = [one.grad for one in training.model[0].parameters()]
    assert sum(not one.equal(other) for one, other in zip(before, after, strict=True)) == 1
    assert wrapper.param_groups


def test_order_that_fails_is_reported_and_does_not_reach_the_script(tmp_path: Path) -> None:
    orders = DrillOrders(tmp_path / "inside")
    with process(LOOP, PYTHONPATH=str(orders.folder)) as (started, identity):
        with pytest.raises(ImpossibleError, match=r"could not carry out the order \(ValueError: .*'much'\)"):
            orders.give(identity, "hold", seconds="much")
        assert float(orders.give(identity, "clock"))
        assert started.poll() is None


def test_drifting_rank_has_another_learning_rate(training: Training, tmp_path: Path) -> None:
    inside._drift({})
    assert training.optimizer.param_groups[0]["lr"] == 0.75
    assert said(tmp_path).endswith("1.5 times as large")


def test_reduction_is_left_out_in_one_step_only(training: Training, tmp_path: Path) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = torch.nn.parallel.DistributedDataParallel(training.model[0])
        reduced: list[int] = []
        model.register_comm_hook(
            None, lambda _, bucket: (reduced.append(1), bucket.buffer(), torch.futures.Future())[2]
        )
        inside._unreduced({})
        assert said(tmp_path) == "does not reduce the gradients of its next backward pass"
        with model.no_sync():  # gradient accumulation
            model(training.rows).sum().backward()
        assert model.require_backward_grad_sync
        model(training.rows).sum().backward()
        assert reduced == [] and model.require_backward_grad_sync
        model(training.rows).sum()
        assert model.require_backward_grad_sync, "the next step is reduced"
        inside._collective({})
        assert said(tmp_path) == "entered an all_reduce that no other rank enters"
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("order", ["_flip", "_stale", "_gradient", "_drift", "_collective", "_unreduced"])
def test_order_that_finds_nothing_reports_nothing(order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inside, "HERE", tmp_path)
    monkeypatch.setattr(inside, "_objects", lambda _: [])
    getattr(inside, order)({"draw": 0.5})
    assert said(tmp_path) == ""


@pytest.mark.parametrize(
    ("damage", "expected"), [(_truncate, "cut off in"), (_remove, "removed"), (_flip_in, "changed in")]
)
def test_damaged_point_is_not_whole(tmp_path: Path, damage: Any, expected: str) -> None:
    save(tmp_path, 10)
    save(tmp_path, 20)
    newest = checkpoint.survey(tmp_path)[0].path
    assert damage(newest, 0.4).endswith(expected)
    left = [one.point.step for one in checkpoint.survey(tmp_path) if one.point is not None and is_whole(one.path)]
    assert left == [10]


def is_whole(path: Path) -> bool:
    try:
        checkpoint.read(checkpoint.point_in(path))
    except CheckpointError:
        return False
    return True


# ---- memory


def test_process_without_its_own_cgroup_is_limited_by_its_address_space(tmp_path: Path) -> None:
    assert MemoryLimit(os.getpid(), tmp_path).name == RLIMIT_AS


def groups(tmp_path: Path, counted: str, own: str) -> Path:
    """Return a /proc whose cgroup v2 folders belong to the test."""
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "7").mkdir()
    (root / "user/job").mkdir(parents=True)
    for folder in (root, root / "user"):
        (folder / "cgroup.subtree_control").write_text(counted)
        (folder / "cgroup.procs").touch()
    (proc / "self/mounts").write_text(f"proc /proc proc rw 0 0\ncgroup2 {root} cgroup2 rw 0 0\n")
    (proc / "7/cgroup").write_text(f"1:name=systemd:/\n0::{own}\n")
    return proc


@pytest.mark.parametrize(("own", "above"), [("/user/job", "cgroup/user"), ("/", "cgroup")])
def test_cgroup_is_made_beside_the_processs_own_if_memory_is_counted(tmp_path: Path, own: str, above: str) -> None:
    proc = groups(tmp_path, "cpu memory pids\n", own)
    assert group_above(7, proc) == tmp_path / above
    limit = MemoryLimit(7, proc)
    made = tmp_path / above / "samebits-drill-7"
    assert limit.name == f"memory.max of {made}"
    assert ((made / "memory.max").read_text(), (made / "cgroup.procs").read_text()) == (str(64 << 20), "7")


def test_without_a_memory_controller_no_cgroup_is_made(tmp_path: Path) -> None:
    assert MemoryLimit(7, groups(tmp_path, "cpu pids\n", "/user/job")).name == RLIMIT_AS


# ---- the preloaded library


def tried(folder: Path, library: Preloaded) -> str:
    """Return what a process under the library reports on writing to two folders and on its clock."""
    code = (
        "import os, sys, time\n"
        "def errors(path):\n"
        "    with open(path, 'wb', buffering=0) as file:\n"
        "        found = []\n"
        "        for do in (lambda: os.write(file.fileno(), b'x'), lambda: os.pwrite(file.fileno(), b'x', 0),\n"
        "                   lambda: os.ftruncate(file.fileno(), 9), lambda: os.posix_fallocate(file.fileno(), 0, 9)):\n"
        "            try:\n"
        "                do()\n"
        "                found.append(0)\n"
        "            except OSError as error:\n"
        "                found.append(error.errno)\n"
        "        return found\n"
        "print(errors(sys.argv[1] + '/a/file'), errors(sys.argv[1] + '/ab'), round(time.time()), flush=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        env={**os.environ, **library.environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_one_failing_folder_and_a_shifted_clock_affect_only_the_jobs_processes(tmp_path: Path, error: int) -> None:
    (tmp_path / "a").mkdir()
    library = Preloaded(tmp_path, tmp_path / "a")
    assert tried(tmp_path, library).startswith("[0, 0, 0, 0] [0, 0, 0, 0]")
    library.set(error=error, ahead_s=-3600)
    full = [error] * 4
    said = tried(tmp_path, library)
    assert said.startswith(f"{full} [0, 0, 0, 0]")
    assert library.refused == 4
    assert abs(int(said.split()[-1]) + 3600 - time.time()) < PATIENCE_S
    library.set()
    assert tried(tmp_path, library).startswith("[0, 0, 0, 0]")
    library.close()


def test_library_needs_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ImpossibleError, match="no C compiler"):
        Preloaded(tmp_path, tmp_path)
    tools = Tools.made(tmp_path, {DrillFault.DISK_FULL, DrillFault.CLOCK_JUMP, DrillFault.KILL}, 1, {})
    assert tools.impossible.keys() == {DrillFault.DISK_FULL, DrillFault.CLOCK_JUMP}


@pytest.mark.parametrize(
    ("compiler", "said"),
    [
        ("#!/bin/sh\nprintf '\\033[31mworse\\n' >&2; exit 4\n", r"cannot build .*\(\\u001b\[31mworse\)"),
        ("#!/bin/sh\nsleep 600 & echo $! >child; sleep 600\n", r"did not build .* within 0\.5 s"),
        ("#!/no/such/interpreter\n", "cannot be run: No such file or directory"),
    ],
    ids=["fails", "hangs", "cannot run"],
)
def test_failing_or_hanging_compiler_makes_the_fault_impossible(
    compiler: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("cc").write_text(compiler)
    Path("cc").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(orders, "COMPILER_TIMEOUT_S", 0.5)
    with pytest.raises(ImpossibleError, match=said):
        Preloaded(tmp_path, tmp_path)
    if (child := Path("child")).exists():
        assert not is_running(int(child.read_text()))


def is_running(pid: int) -> bool:
    """Return whether this process still exists after it has had time to end."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        return not select.select([descriptor], [], [], PATIENCE_S)[0]
    finally:
        os.close(descriptor)


def test_jobs_own_preloads_are_kept(tmp_path: Path) -> None:
    own = {"LD_PRELOAD": "/lib/theirs.so", "PYTHONPATH": "/theirs"}
    tools = Tools.made(tmp_path, {DrillFault.CLOCK_JUMP}, 1, own)
    assert tools.environment["LD_PRELOAD"] == f"{tmp_path}/libc_faults.so:/lib/theirs.so"
    assert tools.environment["PYTHONPATH"] == f"{tmp_path}/inside:/theirs"
    tools.close()


# ---- the network line


@contextmanager
def echoing(port: int) -> Iterator[None]:
    """Echo on the inside, on an IPv6 socket with a mapped address as ZeroMQ uses."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_INET6))
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind((f"::ffff:{INSIDE}", port))
        listener.listen()

        def serve() -> None:
            while True:
                try:
                    peer, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=answer, args=(peer,), daemon=True).start()

        def answer(peer: socket.socket) -> None:
            with peer:
                while data := peer.recv(100):
                    peer.sendall(data)

        threading.Thread(target=serve, daemon=True).start()
        yield
        listener.shutdown(socket.SHUT_RDWR)


def called(port: int) -> socket.socket:
    """Return a connection through the line once it is established."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return socket.create_connection((f"::ffff:{OUTSIDE}", port), timeout=PATIENCE_S)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_line_works_while_a_server_listens_behind_it() -> None:
    port = free_port()
    line = PortForward(port)
    try:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((OUTSIDE, port))
        with echoing(port), called(port) as caller:
            caller.sendall(b"heard")
            assert caller.recv(100) == b"heard"
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                socket.create_connection((OUTSIDE, port)).close()
            except ConnectionRefusedError:
                break
            assert time.monotonic() < deadline
    finally:
        line.close()


def test_cut_line_passes_nothing_closes_nothing_and_loses_nothing() -> None:
    port = free_port()
    line = PortForward(port)
    try:
        with echoing(port), called(port) as caller:
            caller.sendall(b"before")
            assert caller.recv(100) == b"before"
            assert line.cut(os.getpid()) == 1
            caller.sendall(b"meanwhile")
            caller.settimeout(0.3)
            with pytest.raises(TimeoutError):
                caller.recv(100)
            with called(port) as anew:  # a process that reconnects
                anew.sendall(b"anew")
                anew.settimeout(0.3)
                with pytest.raises(TimeoutError):
                    anew.recv(100)
                line.mend()
                for one, text in ((caller, b"meanwhile"), (anew, b"anew")):
                    one.settimeout(PATIENCE_S)
                    assert one.recv(100) == text
    finally:
        line.close()


def test_only_the_targeted_process_is_cut_off(tmp_path: Path) -> None:
    port = free_port()
    line = PortForward(port)
    try:
        with echoing(port), called(port) as ours:
            code = f"import socket\ns = socket.create_connection(({OUTSIDE!r}, {port}))\ns.sendall(b'x')\ns.recv(1)\n"
            with process(f"{code}print('on', flush=True)\ninput()\n") as (started, _):
                assert started.stdout is not None
                assert started.stdout.readline() == "on\n"
                assert line.cut(started.pid) == 1
                ours.sendall(b"ours")
                assert ours.recv(100) == b"ours"
    finally:
        line.close()


# ---- a stored bit


@pytest.mark.parametrize("draw", [0.0, 0.5, 0.999999])
def test_one_bit_of_a_file_is_flipped(tmp_path: Path, draw: float) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(100))
    path.chmod(0o400)
    place, bit = flip_bit(path, draw)
    assert path.read_bytes() == bytes(place) + bytes([1 << bit]) + bytes(99 - place)
    assert path.stat().st_mode & 0o777 == 0o400
