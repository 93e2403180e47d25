"""No file above 400 lines, no class above 25 methods or 15 attributes, but for those below, each with its cause.

A cause says why the parts belong together, not that nobody has found the time; who splits one takes its line out.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST_LINES = 400
MOST_METHODS = 25
MOST_ATTRIBUTES = 15

LONG_FILES = {
    "config.py": "reads every variable: one function a rule, in the table's order",
    "settings_table.py": "one table, both languages beside each other",
    "core/equality.py": "one comparison: what the ranks report, who differs in what, and its sentence",
    "core/messages.py": "one table: every message with its bounds",
    "core/admission.py": "the rules of admission in their order, which decides",
    "core/agent_events.py": "one table: all that an agent hears, and all that it asks for",
    "core/agent.py": "one state machine; its values and its reports are files of their own",
    "core/rendezvous.py": "one round, from its opening to the generation",
    "core/scheduler.py": "one state machine: which part of it hears what, in which order",
    "ops/kept_start.py": "one file's content: written, read, looked for, and made a command again",
    "ops/follow.py": "one loop over all that a follower waits for",
    "ops/following.py": "one state machine: what a follower believes and decides",
    "service/agent.py": "the loop of the agent's thread and the calls from the training thread, under one lock",
    "training/torch_private.py": "one table: each private interface of torch's, with what it relies on",
    "service/scheduler.py": "one loop: socket, core, journal, answers",
    "store/checkpoint/memory/memory_room.py": "one layout of shared memory: who may write which word, and when",
    "training/checkpoint/rank_checkpoints.py": "one rank's points over all places they lie in",
    "training/checkpoint/state_points.py": "one rank's ways to a point, in the order they are tried",
    "training/group/ddp.py": "DistributedDataParallel taken over from one group to the next, step by step",
    "training/group/group.py": "one group, from its addresses to its end",
    "training/process/context.py": "the process between init() and its exit",
    "training/run/elastic_run.py": "one loop: what follows a generation's end",
    "training/state/script_statements.py": "one walk over Python's syntax: every kind of statement and expression",
    "training/state/training_slice.py": "one slice: what a statement needs, and what is read before it is written",
    "training/state/handlers.py": "one table: a handler for each kind of object",
    "training/state/torch_state.py": "the state of a torch script: its arguments, its commits and their checks",
    "training/state/snapshot.py": "one form of a state: what is taken apart beside what it is joined from",
}
LARGE_CLASSES = {
    "core/admission.py:Admission": "the rules in their order",
    "core/agent.py:AgentCore": "one state machine",
    "core/ending.py:Ending": "every way in which a job ends, and who is told",
    "core/rendezvous.py:Rendezvous": "one round",
    "core/scheduler.py:SchedulerCore": "one state machine",
    "core/world.py:World": "slots, and who takes them",
    "training/state/sampler.py:ElasticSampler": "one position in the data, and what may be said of it",
    "net/client.py:Client": "a connection from its first address to its end",
    "net/gate.py:Gate": "a connection's whole life, in which every count is needed",
    "ops/follow.py:Follower": "one loop",
    "ops/following.py:Following": "one state machine",
    "service/agent.py:Agent": "what training asks of the agent: one method a question",
    "training/checkpoint/rank_checkpoints.py:RankCheckpoints": "what a rank asks of its points",
    "training/checkpoint/replay.py:Replay": "the step log's side of one rank",
    "training/checkpoint/state_points.py:StatePoints": "what a run asks of a state's points",
    "training/run/elastic_run.py:ElasticRun": "one loop, from one generation to the next",
    "training/state/base_state.py:State": "the public face, which users extend",
    "training/state/local_sgd.py:LocalSGD": "State, extended",
    "training/state/object_state.py:ObjectState": "State, extended",
    "training/state/torch_state.py:TorchState": "State, extended",
}


def classes(tree: ast.Module) -> list[ast.ClassDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def methods(of: ast.ClassDef) -> int:
    return sum(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in of.body)


def attributes(of: ast.ClassDef) -> int:
    targets = [
        target
        for node in ast.walk(of)
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    ]
    return len({one.attr for one in targets if isinstance(one, ast.Attribute) and ast.unparse(one.value) == "self"})


def test_what_is_long_has_a_cause() -> None:
    long, large = set(), set()
    for path in (ROOT / "runtime" / "samebits").rglob("*.py"):
        name, text = str(path.relative_to(ROOT / "runtime" / "samebits")), path.read_text()
        if len(text.splitlines()) > MOST_LINES:
            long.add(name)
        for one in classes(ast.parse(text)):
            if methods(one) > MOST_METHODS or attributes(one) > MOST_ATTRIBUTES:
                large.add(f"{name}:{one.name}")
    assert long == set(LONG_FILES), "split it, or say why its parts belong together"
    assert large == set(LARGE_CLASSES), "split it, or say why its parts belong together"
