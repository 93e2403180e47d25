"""One process's side of a group: installation, interrupted waits, cut sockets, recognised errors."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, ProcessGroupGloo

from samebits.errors import CommunicationError, GenerationEndedError, UsageError
from samebits.training import torch_private
from samebits.training.group import gloo
from samebits.training.group.breakable_group import BreakableGroup, ReducerGroup
from samebits.training.group.breaker import Breaker, run_breakable
from samebits.training.group.group import Group, _GlooLink, form, form_alone, is_communication_failure
from samebits.training.group.meeting_store import MeetingStore
from tests.hostile.attackers import listening_ports

CPU = torch.device("cpu")
WAIT_S = 60.0


@pytest.fixture
def alone() -> Iterator[Group]:
    group = form_alone(CPU)
    yield group
    group.drop()


def test_group_of_one_listens_on_the_given_address() -> None:
    """A machine without IPv4 has no 127.0.0.1."""
    with pytest.raises(RuntimeError, match=r"192\.0\.2\.1"):
        form_alone(CPU, address="192.0.2.1")


# --- its threads


class Running:
    """A collective that gloo's threads keep running for this many checks."""

    def __init__(self, looks: float) -> None:
        self.looks = looks

    def is_completed(self) -> bool:
        self.looks -= 1
        return self.looks < 0


def test_group_settles_when_no_collective_runs(alone: Group) -> None:
    pg: Any = alone.pg
    for looks in (0, 1, 5):
        pg.launched.add(Running(looks))
    alone.settle(WAIT_S)
    assert pg.unfinished() == []


def test_collective_that_does_not_end_is_awaited_once(alone: Group) -> None:
    pg: Any = alone.pg
    endless = Running(math.inf)
    pg.launched.add(endless)
    began = time.monotonic()
    alone.settle(0.05)
    assert time.monotonic() - began >= 0.05
    alone.settle(WAIT_S)  # not again
    pg.launched.add(Running(3))
    alone.settle(WAIT_S)  # but another one
    assert pg.unfinished() == [endless]
    pg.launched.clear()


def test_broken_group_is_not_awaited(alone: Group) -> None:
    pg: Any = alone.pg
    pg.launched.add(Running(math.inf))
    alone.break_("a member was lost")
    alone.settle(WAIT_S)
    pg.launched.clear()


@pytest.mark.skipif(sys.platform != "linux", reason="a thread's own niceness is Linux's")
@pytest.mark.parametrize(("own", "readers"), [(0, 10), (5, 15), (15, 19)])
def test_reader_thread_yields_to_other_threads(own: int, readers: int) -> None:
    store, nice = HashStore(), dict[str, set[int]]()

    def connect() -> None:
        os.setpriority(os.PRIO_PROCESS, 0, own)
        before = _native_threads().keys()
        mesh = gloo.connect(store, 0, 1, "127.0.0.1", timedelta(seconds=WAIT_S), timedelta(seconds=WAIT_S))
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:  # each names itself; before torch 2.13 the reader has no name
            threads = {thread: name for thread, name in _native_threads().items() if thread not in before}
            others = [thread for thread, name in threads.items() if name != "pt_gloo_runloop"]
            if len(others) == 1 and len(threads) > 1:
                break
            time.sleep(0.01)
        for thread, name in threads.items():
            role = name if name == "pt_gloo_runloop" else "reader"
            nice.setdefault(role, set()).add(os.getpriority(os.PRIO_PROCESS, thread))
        nice["this"] = {os.getpriority(os.PRIO_PROCESS, 0)}
        del mesh

    aside = threading.Thread(target=connect)  # its niceness ends with it
    aside.start()
    aside.join(WAIT_S)
    assert nice == {"reader": {readers}, "pt_gloo_runloop": {own}, "this": {own}}


def _native_threads() -> dict[int, str]:
    """Return the threads that Python did not start, with their names."""
    found, of_python = {}, {thread.native_id for thread in threading.enumerate()}
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # one of another group that just ended
            if int(thread.name) not in of_python:
                found[int(thread.name)] = (thread / "comm").read_text().strip()
    return found


# --- torch's default group


def test_group_of_one_is_torchs_default_group(alone: Group) -> None:
    assert dist.get_backend() == "gloo"
    assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
    tensor = torch.full((3,), 2.0)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2.0, 2.0, 2.0]
    assert dist.group.WORLD is alone.pg
    subgroup = dist.new_group([0])
    dist.barrier(group=subgroup)


def test_subgroup_is_made_whether_or_not_torch_passes_the_backend(alone: Group) -> None:
    assert isinstance(alone.pg, BreakableGroup)
    common = {"timeout": timedelta(seconds=WAIT_S), "group_desc": None, "pg_options": None}
    for name, told in (("until 2.13", {}), ("since 2.14", {"backend": "gloo"})):
        subgroup = alone.pg.new_group([0], group_name=name, **common, **told)  # type: ignore[arg-type]
        assert subgroup is not None
        subgroup.allreduce([torch.ones(1)]).wait()


def test_dropped_group_leaves_torch_free_for_the_next() -> None:
    first = form_alone(CPU)
    dist.new_group([0])
    first.drop()
    assert not dist.is_initialized()
    second = form_alone(CPU)
    dist.barrier()
    assert dist.group.WORLD is second.pg
    first.drop()  # again: it must not drop the second one
    assert dist.group.WORLD is second.pg
    second.drop()


def test_group_destroyed_by_the_script_is_dropped_all_the_same(alone: Group) -> None:
    dist.destroy_process_group()
    alone.drop()
    assert not dist.is_initialized()


def test_second_default_group_is_refused(alone: Group) -> None:
    with pytest.raises(UsageError, match=r"init_process_group\(\)"):
        form_alone(CPU)
    assert dist.group.WORLD is alone.pg


def test_name_instead_of_an_address_is_refused() -> None:
    with pytest.raises(UsageError, match="numeric IP address"):
        form(CPU, 0, 1, _Never(), generation=1, on_breakable=lambda call: None, address="localhost")


def test_failed_formation_is_reported() -> None:
    with pytest.raises(UsageError, match="generation 4"):
        _ = Group(CPU, 0, 1, _Never(), name="generation 4").pg


def test_refusal_stops_the_scripts_own_calls_but_not_ddp() -> None:
    side = ["before"]
    group = form_alone(CPU, alone=lambda: side[0])
    try:
        wrapper = torch.nn.parallel.DistributedDataParallel(torch.nn.BatchNorm1d(2))  # broadcasts, as does each forward
        wrapper(torch.ones(3, 2)).sum().backward()
        for call in (lambda: dist.all_reduce(torch.ones(1)), dist.barrier, lambda: dist.new_group([0])):
            for side[0] in ("before", "after"):
                with pytest.raises(
                    UsageError, match=rf"a collective {side[0]} samebits\.elastic\.run would run in this"
                ):
                    call()
    finally:
        group.drop()


# --- ending a wait


class _Never:
    def __init__(self) -> None:
        self.waiting = threading.Event()
        self.released = threading.Event()

    def publish(self, blob: bytes) -> None:
        self.waiting.set()

    def wait(self) -> Sequence[bytes]:
        self.released.wait(WAIT_S)
        raise GenerationEndedError("generation 9 was cancelled")


def test_breaking_ends_a_formation_whose_exchange_does_not_answer() -> None:
    exchange = _Never()
    breaks: list[Any] = []
    threading.Thread(target=lambda: exchange.waiting.wait(WAIT_S) and breaks[0]("node 3 was lost"), daemon=True).start()
    with pytest.raises(GenerationEndedError, match="generation 9 was broken: node 3 was lost"):
        form(CPU, 0, 2, exchange, generation=9, on_breakable=breaks.append)
    assert not dist.is_initialized()
    exchange.released.set()


def test_group_broken_just_as_it_is_formed_is_not_installed() -> None:
    group = Group(CPU, 0, 1, _Broken(), name="generation 3")
    _Broken.group = group
    with pytest.raises(GenerationEndedError, match="too late"):
        group.form()
    assert not dist.is_initialized()


class _Broken:
    group: Group

    def publish(self, blob: bytes) -> None:
        self._blob = blob

    def wait(self) -> list[bytes]:
        self.group.break_("too late")
        return [self._blob]


def test_cancelled_exchange_ends_a_formation_with_its_own_error() -> None:
    exchange = _Never()
    exchange.released.set()
    with pytest.raises(GenerationEndedError, match="generation 9 was cancelled"):
        form(CPU, 0, 2, exchange, generation=9, on_breakable=lambda call: None)
    assert not dist.is_initialized()


def test_broken_group_refuses_every_call(alone: Group) -> None:
    assert not alone.broken
    alone.break_("told so")
    alone.break_("told twice")
    assert alone.broken
    for call in (dist.barrier, lambda: dist.all_reduce(torch.ones(1)), lambda: dist.new_group([0])):
        with pytest.raises(GenerationEndedError, match="told so"):
            call()


def test_breaker_fails_current_waiters_once_and_later_ones() -> None:
    breaker = Breaker("generation 2")
    one, other = torch.futures.Future(), torch.futures.Future()
    breaker.watch(one)
    breaker.watch(other)
    assert breaker.release(other)
    assert breaker.throw("a reason")
    assert not breaker.throw("another")
    with pytest.raises(GenerationEndedError, match="generation 2 was broken: a reason"):
        one.wait()
    assert not other.done()
    assert not breaker.release(one)
    with pytest.raises(GenerationEndedError):
        breaker.watch(other)
    with pytest.raises(GenerationEndedError):
        breaker.check()


def test_uninterruptible_call_gives_its_result_or_its_error() -> None:
    breaker = Breaker("generation 2")
    assert run_breakable(breaker, lambda: 5, "test") == 5
    with pytest.raises(ZeroDivisionError):
        run_breakable(breaker, lambda: 1 // 0, "test")


def test_uninterruptible_call_is_abandoned_when_the_breaker_is_triggered() -> None:
    breaker, entered, end = Breaker("generation 2"), threading.Event(), threading.Event()

    def call() -> bool:
        entered.set()
        return end.wait(WAIT_S)

    threading.Thread(target=lambda: entered.wait(WAIT_S) and breaker.throw("now"), daemon=True).start()
    with pytest.raises(GenerationEndedError, match="now"):
        run_breakable(breaker, call, "test")
    end.set()


def test_work_honours_the_callers_own_timeout(alone: Group) -> None:
    pair, meshes = _without_its_peer(alone.breaker)
    work = pair.allreduce([torch.ones(1)], dist.AllreduceOptions())
    with pytest.raises(RuntimeError, match="timed out"):
        work.wait(timedelta(milliseconds=50))
    assert not work.is_completed()
    gloo.cut(_all_of(meshes))
    # gloo may forget to wake it; then its own timeout applies
    with pytest.raises(RuntimeError, match=r"Connection closed|Timed out"):
        work.wait()


def test_exception_of_a_signal_handler_during_a_wait_is_not_lost() -> None:
    pair, meshes = _without_its_peer(Breaker("generation 2"))
    peer: Any = next(mesh for mesh in meshes if mesh.rank() == 1)  # torch's stubs lack its methods

    def fail(*_: object) -> None:
        raise RuntimeError("the script's own")

    def signal_and_join(waits: threading.Event) -> None:
        waits.wait()
        time.sleep(0.003)  # within the first slice of the wait
        os.kill(os.getpid(), signal.SIGUSR1)
        peer.allreduce([torch.ones(1)]).wait()

    before = signal.signal(signal.SIGUSR1, fail)
    try:
        for _ in range(5):
            work, waits = pair.allreduce([torch.ones(1)], dist.AllreduceOptions()), threading.Event()
            thread = threading.Thread(target=signal_and_join, args=(waits,))
            thread.start()
            with pytest.raises(RuntimeError, match="the script's own"):
                waits.set()
                work.wait()
            thread.join()
            work.wait()
    finally:
        signal.signal(signal.SIGUSR1, before)
        gloo.cut(_all_of(meshes))


def test_backward_pass_waits_for_its_buckets_after_a_failed_one_too() -> None:
    breaker = Breaker("generation 2")
    pair, meshes = _without_its_peer(breaker)
    reducer = ReducerGroup(pair)
    parameter = torch.ones(1, requires_grad=True)

    def launch(_: torch.Tensor) -> None:
        reducer.allreduce([torch.ones(1)], dist.AllreduceOptions())
        if len(pair.unfinished()) == 1:
            raise ZeroDivisionError("the script's own")
        threading.Thread(target=breaker.throw, args=("the peer was lost",), daemon=True).start()

    parameter.register_hook(launch)
    with pytest.raises(ZeroDivisionError):
        (parameter * 2).sum().backward()
    with pytest.raises(GenerationEndedError, match="the peer was lost"):
        (parameter * 2).sum().backward()
    assert len(pair.unfinished()) == 2, "gloo still runs both: its mesh must not be freed before they end"
    with pytest.raises(GenerationEndedError, match="the peer was lost"):
        reducer.allreduce([torch.ones(1)], dist.AllreduceOptions())
    gloo.cut(_all_of(meshes))


def _without_its_peer(breaker: Breaker) -> tuple[BreakableGroup, list[ProcessGroupGloo]]:
    """Return a group of two whose other rank is connected but never joins, and both meshes."""
    store, meshes = HashStore(), []

    def mesh(rank: int) -> None:
        limit = timedelta(seconds=WAIT_S)
        meshes.append(gloo.connect(store, rank, 2, "127.0.0.1", limit, limit))

    other = threading.Thread(target=mesh, args=(1,))
    other.start()
    mesh(0)
    other.join()
    inner = dist.ProcessGroup(store, 0, 2)
    pair = BreakableGroup(inner, breaker, timedelta(seconds=WAIT_S), lambda *_: None)
    for one in (inner, pair):
        torch_private.dress_group(one, meshes[0] if meshes[0].rank() == 0 else meshes[1], "1", "undefined")
    return pair, meshes


def _all_of(meshes: list[ProcessGroupGloo]) -> gloo.Endpoints:
    """Return this process's listeners, the only ones there are."""
    endpoints = gloo.Endpoints()
    for descriptor in range(3, 256):
        try:
            one = socket.socket(fileno=socket.dup(descriptor))
        except OSError:
            continue
        with one:
            if one.family == socket.AF_INET and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                endpoints.own.add(one.getsockname())
    return endpoints


# --- gloo's sockets


def test_gloo_publishes_the_address_it_listens_on() -> None:
    store = HashStore()
    mesh = gloo.connect(store, 0, 1, "127.0.0.1", timedelta(seconds=5), timedelta(seconds=5))
    found = gloo.address_in(store.get("0/0"))
    assert found in listening_ports(os.getpid())
    del mesh


@pytest.mark.parametrize("value", [b"", b"1", b"x" * 200, bytes(200), b"\x05" + bytes(300), b"\xff" * 300])
def test_other_values_hold_no_address(value: bytes) -> None:
    assert gloo.address_in(value) is None


def test_only_connections_between_the_generations_addresses_are_cut() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gloos, socket.create_server(("127.0.0.1", 0)) as users:
        to_gloo, to_user = socket.create_connection(gloos.getsockname()), socket.create_connection(users.getsockname())
        from_gloo, from_user = gloos.accept()[0], users.accept()[0]
        with to_gloo, to_user, from_gloo, from_user:
            endpoints = gloo.Endpoints()
            assert gloo.cut(endpoints) == 0
            endpoints.peers.add(gloos.getsockname())
            assert gloo.cut(endpoints) == 1
            assert from_gloo.recv(1) == b""
            from_user.sendall(b"1")
            assert to_user.recv(1) == b"1"
            own = gloo.Endpoints()
            own.own.add(users.getsockname())
            assert gloo.cut(own) == 1
            assert to_user.recv(1) == b""
            socket.create_connection(users.getsockname()).close()  # the listener still listens


# --- the exchange of addresses


class _Table:
    """An exchange between threads."""

    def __init__(self, size: int) -> None:
        self._blobs: dict[int, bytes] = {}
        self._size = size
        self._all = threading.Condition()

    def seat(self, rank: int) -> _Seat:
        return _Seat(self, rank)


class _Seat:
    def __init__(self, table: _Table, rank: int) -> None:
        self._table, self._rank = table, rank

    def publish(self, blob: bytes) -> None:
        with self._table._all:
            assert self._rank not in self._table._blobs, "published twice"
            self._table._blobs[self._rank] = blob
            self._table._all.notify_all()

    def wait(self) -> list[bytes]:
        with self._table._all:
            assert self._table._all.wait_for(lambda: len(self._table._blobs) == self._table._size, WAIT_S)
            return [self._table._blobs[rank] for rank in range(self._table._size)]


def _stores(size: int) -> tuple[list[MeetingStore], list[Breaker]]:
    table, breakers = _Table(size), [Breaker("generation 1") for _ in range(size)]
    stores = [
        MeetingStore(table.seat(rank), rank, size, "127.0.0.1", breakers[rank], gloo.Endpoints(), timedelta(seconds=60))
        for rank in range(size)
    ]
    return stores, breakers


def _together(*calls: Any) -> list[Any]:
    results: list[Any] = [None] * len(calls)

    def run(index: int) -> None:
        results[index] = calls[index]()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    return results


def test_keys_set_before_the_first_read_travel_in_one_message() -> None:
    (zero, one, two), _ = _stores(3)
    for store, name in ((zero, "zero"), (one, "one"), (two, "two")):
        store.set(name, name.encode())
    assert (
        _together(*(lambda s=s: s.multi_get(["zero", "one", "two"]) for s in (zero, one, two)))
        == [[b"zero", b"one", b"two"]] * 3
    )
    assert zero.check(["one"])
    zero.wait(["two"])


def test_message_is_sent_once_every_mesh_has_set_its_key_or_failed() -> None:
    table = _Table(1)
    rest = Breaker("generation 1"), gloo.Endpoints(), timedelta(seconds=60)
    store = MeetingStore(table.seat(0), 0, 1, "127.0.0.1", *rest, meshes=3)
    store.set("group", b"1")

    def other_meshes() -> None:
        assert not table._blobs
        store.set("subgroup", b"2")
        store.await_one_less()

    met, _ = _together(store.meet, other_meshes)
    assert met == {"group": b"1", "subgroup": b"2"}


def test_subgroups_connect_together_with_their_group() -> None:
    table = _Table(2)
    groups = [Group(CPU, rank, 2, table.seat(rank), name="g", ahead=((0, 1), (rank,), (0, 1))) for rank in range(2)]
    for begun in [one.begin() for one in groups]:
        begun.result(WAIT_S)
    for one in groups:
        assert isinstance(one._link, _GlooLink)
        subgroups = {name: mesh.result(WAIT_S) for name, mesh in one._link._begun.items()}
        assert {name: mesh.size() for name, mesh in subgroups.items()} == {
            "0,1.1/": 2,
            f"{one.rank}.1/": 1,
            "0,1.2/": 2,
        }
        one.drop()


def test_later_keys_go_through_rank_0() -> None:
    (zero, one, two), _ = _stores(3)
    _together(zero.meet, one.meet, two.meet)
    assert _together(lambda: two.get("later"), lambda: one.set("later", b"\x00\xff"))[0] == b"\x00\xff"
    assert zero.get("later") == b"\x00\xff"
    assert [store.add("count", 2) for store in (zero, one, two)] == [2, 4, 6]
    assert not one.check(["later", "never"])
    assert one.compare_set("later", "", "no") == b"\x00\xff"
    assert two.delete_key("later")


def test_breaking_ends_the_wait_for_a_later_key() -> None:
    (zero, one), (_, breaker) = _stores(2)
    _together(zero.meet, one.meet)
    one.set("known", b"1")
    threading.Thread(target=breaker.throw, args=("rank 0 was lost",), daemon=True).start()
    with pytest.raises(GenerationEndedError, match="rank 0 was lost"):
        one.get("never")


# --- errors


def _raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def _caused(error: BaseException, cause: BaseException) -> BaseException:
    try:
        raise error from cause
    except BaseException as caught:
        return caught


GLOO = "[/__w/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] "
LOST = [
    CommunicationError("lost"),
    GenerationEndedError("over"),
    dist.DistNetworkError("Failed to recv, got 0 bytes"),
    dist.DistStoreError("wait timeout after 30000ms"),
    dist.DistBackendError("NCCL error"),
    RuntimeError(GLOO + "Connection closed by peer [127.0.0.1]:1234. This is typically caused by"),
    RuntimeError(GLOO + "Read error [127.0.0.1]:1234: Connection reset by peer."),
    RuntimeError("[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv"),
    RuntimeError("Application timeout caused pair closure"),
    RuntimeError(
        "Rank 0 successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 2"
    ),
    RuntimeError("Got the following error when running the callback: GenerationEndedError: the process group of …"),
    RuntimeError(
        "Got the following error when running the callback: RuntimeError: " + GLOO + "Connection closed by peer"
    ),
    RuntimeError("FORCE STOP.[ERROR] 2026-11-25 (PID:7, Device:0, RankID:0) ERR00100 PTA call acl api failed"),
    RuntimeError("SUSPECT REMOTE ERROR."),
    RuntimeError("NCCL communicator was aborted after a previous error"),
    RuntimeError("NCCL operation timed out"),
    RuntimeError("NCCL Async Error: remote process exited or there was a network error \nNCCL Last Error: socket"),
    RuntimeError("NCCL all_reduce failed: unhandled system error (run with NCCL_DEBUG=INFO) \nNCCL Last Error: "),
    _caused(ValueError("the user's"), CommunicationError("lost")),
]
OTHERS = [
    RuntimeError("my connection to the database timed out"),
    RuntimeError("Connection closed by peer"),
    RuntimeError("GenerationEndedError: a user writes this"),
    RuntimeError("CUDA out of memory"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("Failed to initialize NCCL communicator: invalid usage \nNCCL Last Error: Duplicate GPU detected"),
    RuntimeError("UCE ERROR."),
    RuntimeError("they force stop me"),
    RuntimeError("Got the following error when running the callback: ZeroDivisionError: division by zero"),
    RuntimeError(
        "[enforce fail at ../third_party/gloo/gloo/transport/tcp/pair.cc:446] op.preamble.length <= op.nbytes. 8 vs 4. "
        "Received data size doesn't match expected size. Is there a distributed collective mismatch in your code?"
    ),
    ValueError(GLOO + "Connection closed by peer"),
    KeyError("x"),
    KeyboardInterrupt(),
    UsageError("wrong order"),
]


@pytest.mark.parametrize("error", LOST, ids=repr)
def test_lost_peer_is_recognised(error: BaseException) -> None:
    assert is_communication_failure(error)
    assert is_communication_failure(_raised(error))


@pytest.mark.parametrize("error", OTHERS, ids=repr)
def test_every_other_error_is_the_users(error: BaseException) -> None:
    assert not is_communication_failure(error)
    assert not is_communication_failure(_raised(error))


def test_error_while_handling_a_lost_peer_counts_as_one_unless_suppressed() -> None:
    def handle(error: BaseException) -> BaseException:
        try:
            try:
                raise CommunicationError("lost")
            except CommunicationError:
                raise error  # noqa: B904 - the context is the point
        except BaseException as caught:
            return caught

    assert is_communication_failure(handle(KeyError("cleanup")))
    mended = _caused(ValueError("I know better"), KeyError("mine"))
    mended.__context__ = CommunicationError("lost")
    assert not is_communication_failure(mended)
