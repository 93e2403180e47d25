"""The rank processes of test_group_processes.py: ``group_ranks.py <port> <node> <scenario> <arguments>``."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import reduce_scatter_tensor_coalesced
from torch.nn.parallel import DistributedDataParallel

from samebits.store import collective_ring
from samebits.store.process_identity import ProcessIdentity
from samebits.training.group import ddp
from samebits.training.group.group import Group, form_alone, is_communication_failure
from tests.training.hub import WAIT_S, Member

CPU = torch.device("cpu")
ROUNDS = 3  # of a loop before it counts as running


def planned(member: Member, after: int, **options: Any) -> tuple[Group, int]:
    """Return the next generation's group, not formed yet, and its number."""
    generation, rank, world_size = member.next_plan(after)
    group = Group(CPU, rank, world_size, member.exchange(generation), name=f"generation {generation}", **options)
    member.on_break = group.break_
    return group, generation


def enter(member: Member, after: int = -1, **options: Any) -> tuple[Group, int]:
    group, generation = planned(member, after, **options)
    return group.form(), generation


def until_it_fails(member: Member, act: Callable[[], object], generation: int = 0) -> None:
    """Repeat ``act`` until the group ends; report when the loop runs and how it ended."""
    rounds = 0
    try:
        while True:
            act()
            rounds += 1
            if rounds == ROUNDS:
                member.say("looping", generation=generation)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        member.say("left", generation=generation, lost=is_communication_failure(error), error=text)


def pairwise_of_this_process() -> list[str]:
    """Return the sends and receives in its ring of collectives, without shapes and line numbers."""
    identity = ProcessIdentity.of(os.getpid())
    contents = None if identity is None else collective_ring.read(identity)
    assert contents is not None
    told = [str(one) for one in contents.launched if one.is_pairwise]
    return [re.sub(r"\([^)]*\) |:\d+,", "", one) for one in told]


def loop(
    member: Member,
    kinds: list[str],
    elements: int = 250_000,
    forgotten: bool = False,
    kept: bool = False,
    rests: bool = False,
) -> None:
    """Repeat the script's own collective until the group ends, with the next kind in the next generation.

    With ``forgotten`` no connection is cut, so gloo never wakes its waiters, as with a message cut off midway. With
    ``kept`` the group is not dropped after its end. With ``rests`` rank 0 joins only the first rounds, and nothing is
    on the way to it when it leaves.
    """
    generation = -1
    for kind in kinds:
        group, generation = enter(member, generation, connect_timeout_s=3600.0)
        if forgotten:
            group._link.cut = lambda: None
        act = act_of(kind, group, torch.ones(elements))
        until_it_fails(member, _resting(act, group) if rests and group.rank == 0 else act, generation)
        if not kept:
            group.drop()
    member.wait_for_word("end")


def _resting(act: Callable[[], object], group: Group) -> Callable[[], object]:
    """Act often enough for the others to count as looping, then wait for the group's end."""
    rounds = iter(range(ROUNDS))

    def rest() -> None:
        while not group.broken:
            time.sleep(0.001)
        group.breaker.check()

    return lambda: act() if next(rounds, None) is not None else rest()


def act_of(kind: str, group: Group, tensor: torch.Tensor) -> Callable[[], object]:
    match kind:
        case "all_reduce":
            return lambda: dist.all_reduce(tensor.fill_(1.0))
        case "broadcast":
            return lambda: dist.broadcast(tensor, 0)
        case "reduce_scatter":  # what FSDP2's backward pass does
            part = torch.empty(tensor.numel() // group.world_size)
            whole = tensor[: part.numel() * group.world_size]
            return lambda: dist.reduce_scatter_tensor(part, whole)
        case "reduce_scatter of a list":
            parts = list(tensor.split(1000)[: group.world_size])
            return lambda: dist.reduce_scatter(torch.empty(1000), parts)
        case "barrier":
            return dist.barrier
        case "monitored_barrier":
            return dist.monitored_barrier
        case "pairwise":
            return lambda: _to_the_right(group, tensor)
        case "future":
            return lambda: _as_future(tensor)
        case "subgroup":
            subgroup = dist.new_group(list(range(group.world_size)))
            return lambda: dist.all_reduce(tensor.fill_(1.0), group=subgroup)
        case "objects":
            return lambda: dist.all_gather_object([None] * group.world_size, {"rank": group.rank})
        case "backward" | "plain backward":
            model = DistributedDataParallel(nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300)), bucket_cap_mb=0.1)
            if kind == "backward":
                ddp.attach(model, group, None)
            return lambda: model(torch.ones(2, 300)).sum().backward()
        case "buffers":
            model = DistributedDataParallel(nn.Sequential(nn.Linear(9, 9), nn.BatchNorm1d(9)))
            return lambda: model(torch.ones(2, 9)).sum().backward()
    raise ValueError(kind)


def _to_the_right(group: Group, tensor: torch.Tensor) -> None:
    request = dist.isend(tensor, (group.rank + 1) % group.world_size)
    dist.recv(torch.empty_like(tensor), (group.rank - 1) % group.world_size)
    assert request is not None
    request.wait()


def _as_future(tensor: torch.Tensor) -> None:
    work = dist.all_reduce(tensor.fill_(1.0), async_op=True)
    assert work is not None
    work.get_future().then(lambda done: done.value()[0].sum()).wait()


def forming(member: Member) -> None:
    """Form and use a group; if it ends meanwhile, the next one."""
    generation, total = -1, 0.0
    while not total:
        group, generation = planned(member, generation, connect_timeout_s=3600.0)
        one = torch.ones(1)
        try:
            group.form()
            dist.all_reduce(one)
        except Exception as error:
            if not is_communication_failure(error):
                raise
            member.say("left", generation=generation, error=str(error))
            group.drop()
        else:
            total = one.item()
    member.say("done", total=total)
    member.wait_for_word("end")


def subgroup_forming(member: Member, absent: int) -> None:
    """Let all but one rank make a subgroup that includes it."""
    group, _ = enter(member)
    if group.rank == absent:
        member.say("looping", generation=0)
        member.wait_for_word("end")
        return
    member.say("looping", generation=0)
    until_it_fails(member, lambda: dist.new_group(list(range(group.world_size))))


def ending(member: Member, pending: str) -> None:
    """End the process with its own status during a collective that no other rank joins."""
    group, _ = enter(member)
    if group.rank == 0:
        match pending:
            case "future" | "unending":
                if pending == "unending":  # as when gloo has lost the receiver of a message that was cut off midway
                    group._link.cut = lambda: None
                work = dist.all_reduce(torch.ones(4), async_op=True)
                assert work is not None
                work.get_future().then(lambda done: done.value())
            case "backward":
                model = DistributedDataParallel(nn.Linear(4, 4), init_sync=False)
                ddp.attach(model, group, None)
                threading.Thread(target=lambda: model(torch.ones(2, 4)).sum().backward(), daemon=True).start()
            case "pairwise":
                threading.Thread(target=dist.recv, args=(torch.ones(4), 1), daemon=True).start()
        while pending == "backward" and not group.pg.unfinished():
            pass
        while pending == "pairwise" and not any(one.name == "samebits-pairwise" for one in threading.enumerate()):
            pass  # a thread that starts to receive while the interpreter ends is not waited for
        member.say("pending")
        sys.exit(7)
    member.wait_for_word("end")


def _reduce_scatters_are_gloos(group: Group, op: Any) -> None:
    """Check that our reduce-scatter has the bits of gloo's, which notices a broken group late."""
    pg: Any = group.pg
    rank, size, inner = dist.get_rank(), dist.get_world_size(), pg._inner
    given = torch.randn(size * 1001, generator=torch.Generator().manual_seed(rank))
    own, options = torch.empty(1001), dist.ReduceScatterOptions()
    options.reduceOp = op
    inner._reduce_scatter_base(own, given.clone(), options).wait()
    ours = torch.empty(1001)
    work = dist.reduce_scatter_tensor(ours, given, op, async_op=True)
    assert work is not None
    assert work.get_future().wait()[0] is not None and work.wait()
    assert torch.equal(ours, own)
    inner.reduce_scatter([own], [list(given.clone().chunk(size))], options).wait()
    dist.reduce_scatter(ours, list(given.chunk(size)), op)
    assert torch.equal(ours, own)
    several = reduce_scatter_tensor_coalesced([given, given[: size * 2]], "sum", [0, 0], group=pg)
    assert [one.numel() for one in several] == [1001, 2]
    try:
        dist.reduce_scatter_tensor(ours, given[1:], op)
    except RuntimeError as error:
        assert "1001" in str(error)
    else:
        raise AssertionError("an input of another size was reduced")


def many_calls(member: Member) -> None:
    """Run one of each kind of collective and check it."""
    group, _ = enter(member)
    rank, size = dist.get_rank(), dist.get_world_size()
    assert dist.get_backend() == "gloo"
    one = torch.full((4,), float(rank))
    total = float(sum(range(size)))
    dist.all_reduce(one)
    assert one.tolist() == [total] * 4
    work = dist.all_reduce(one, async_op=True)
    assert work is not None
    assert work.get_future().then(lambda done: done.value()[0].sum().item()).wait() == total * size * 4
    dist.broadcast(one, 1)
    parts = [torch.zeros(2) for _ in range(size)]
    dist.all_gather(parts, torch.full((2,), float(rank)))
    assert [part[0].item() for part in parts] == list(range(size))
    flat = torch.zeros(size)
    dist.all_gather_into_tensor(flat, torch.tensor([float(rank)]))
    assert flat.tolist() == list(range(size))
    dist.reduce(one, 0)
    dist.gather(torch.tensor([rank]), [torch.zeros(1, dtype=torch.int64) for _ in range(size)] if rank == 0 else None)
    mine = torch.zeros(1)
    dist.scatter(mine, [torch.tensor([float(peer)]) for peer in range(size)] if rank == 0 else None)
    assert mine.item() == rank
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):
        _reduce_scatters_are_gloos(group, op)
    exchanged = torch.zeros(size)
    dist.all_to_all_single(exchanged, torch.full((size,), float(rank)))
    assert exchanged.tolist() == list(range(size))
    if rank == 0:
        dist.send(torch.tensor([7.0]), 1)
        dist.isend(torch.tensor([8.0]), 1).wait()
    elif rank == 1:
        got = torch.zeros(1)
        assert dist.recv(got) == 0
        assert got.item() == 7.0
        request = dist.irecv(got, 0)
        assert request is not None
        request.wait()
        assert got.item() == 8.0
    peer = (1, 0, rank)[rank]
    if peer != rank:
        ways = [dist.P2POp(dist.isend, torch.ones(2), peer), dist.P2POp(dist.irecv, torch.zeros(2), peer)]
        for request in dist.batch_isend_irecv(ways):
            request.wait()
        assert pairwise_of_this_process() == [
            f"{way} rank {peer} #{number} at group_ranks.py over"
            for way, number in (
                [("send to", 1), ("send to", 2), ("send to", 3), ("recv from", 1)]
                if rank == 0
                else [("recv from", 1), ("recv from", 2), ("send to", 1), ("recv from", 3)]
            )
        ]
    dist.barrier()
    dist.monitored_barrier()
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert [one["rank"] for one in objects] == list(range(size))
    pair = dist.new_group([0, 1])
    assert (pair == dist.GroupMember.NON_GROUP_MEMBER) == (rank > 1)
    if rank < 2:
        both = torch.ones(1)
        dist.all_reduce(both, group=pair)
        assert both.item() == 2
    # Up to torch 2.13 its name counts the groups a rank is a member of; since then, those it has named, which the
    # others do not count. So the same ranks as before, and nothing after it, with torch alone as well.
    local = dist.new_group([0, 1], use_local_synchronization=True) if rank < 2 else None
    if local is not None:
        dist.barrier(group=local)
    store = dist.distributed_c10d._get_default_store()
    assert store.add("counted", 1) >= 1
    mesh = dist.init_device_mesh("cpu", (size,))
    assert mesh.get_group().size() == size
    gathered = torch.ops._c10d_functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD.group_name)
    assert torch.ops._c10d_functional.wait_tensor(gathered).tolist() == [size, size]
    dist.barrier()
    member.say("done", broken=group.broken)
    member.wait_for_word("end")
    group.drop()
    assert not dist.is_initialized()


def cycles(member: Member, count: int) -> None:
    """Form, use and drop repeatedly; then report what is left open."""
    form_alone(CPU).drop()
    group, generation = enter(member)
    before = _open()
    for _ in range(count):
        subgroup = dist.new_group(list(range(dist.get_world_size())))
        dist.all_reduce(torch.ones(10))
        dist.all_reduce(torch.ones(10), group=subgroup)
        del subgroup
        member.say("ready", generation=generation)
        following, number = planned(member, generation)
        group.drop()
        group, generation = following.form(), number
    dist.barrier()
    member.say("left open", before=before, after=_open())
    member.wait_for_word("end")


def besieged(member: Member) -> None:
    """Form, train in the group, a subgroup and DDP, and drop, while the test sends strangers."""
    form_alone(CPU).drop()
    before, _ = _open()
    group, generation = planned(member, -1)
    group.form()
    member.say("stands", generation=generation)
    member.wait_for_word("train")
    torch.manual_seed(0)
    subgroup = dist.new_group(list(range(dist.get_world_size())))
    model = DistributedDataParallel(nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(20):
        optimizer.zero_grad()
        model(torch.full((2, 30), float(group.rank + step))).sum().backward()
        optimizer.step()
        dist.all_reduce(torch.ones(1), group=subgroup)
    weights = b"".join(one.detach().numpy().tobytes() for one in model.parameters())
    member.say("trained", sha256=hashlib.sha256(weights).hexdigest())
    member.wait_for_word("drop")
    del model, optimizer, subgroup
    group.drop()
    deadline = time.monotonic() + WAIT_S
    while (after := _open()[0]) > before and time.monotonic() < deadline:
        time.sleep(0.01)
    member.say("left open", before=before, after=after)
    member.wait_for_word("end")


def _open() -> tuple[int, int]:
    """Return descriptors and threads, once everything dropped is freed and every helper thread has ended."""
    for thread in threading.enumerate():
        if thread.name.startswith("samebits-"):
            thread.join()
    return len(list(Path("/proc/self/fd").iterdir())), len(list(Path("/proc/self/task").iterdir()))


SCENARIOS = {one.__name__: one for one in (loop, forming, subgroup_forming, ending, many_calls, cycles, besieged)}


def main() -> None:
    port, node, scenario, arguments = sys.argv[1:]
    torch.set_num_threads(1)
    member = Member(int(port), int(node))
    try:
        SCENARIOS[scenario](member, **json.loads(arguments))
    except SystemExit:
        raise
    except BaseException as error:
        member.say("failed", error=f"{type(error).__name__}: {error}")
        raise
    member.say("end")


if __name__ == "__main__":
    main()
