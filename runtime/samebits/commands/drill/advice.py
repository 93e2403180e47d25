"""Explain why a script's results change after faults, from the differences, the warnings and the script's text.

Pure functions; the script is only read here, never run. The two jobs show where the bits differ, and after which fault.
A variable, a sampler or a schedule outside the state is found in the script, with its line. If neither shows a cause,
the usual causes are listed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from samebits.account.events import EventKind, JobEvent
from samebits.commands.drill.compare import Compared
from samebits.commands.drill.plan import DrillOutcome, Injected

USUAL = (
    "what the training depends on and no State holds (a counter, an average) goes into TorchState as a keyword",
    "the sampler is an ElasticSampler and is given to TorchState(sampler=…)",
    "random numbers come back exactly with TorchState(rng='per_step', seed=…)",
    "every optimizer.step() is followed by state.commit()",
    "torch.use_deterministic_algorithms(True), and one OMP_NUM_THREADS in every process",
)
MOST_TOLD = 12
_OWN = {"state", "self"}
_ENDS = {EventKind.TRAINED, EventKind.LEFT, EventKind.INTERRUPTED, EventKind.FINISHED}
_SAMPLERS = ("DistributedSampler", "RandomSampler", "SubsetRandomSampler", "WeightedRandomSampler")
_DRAWS = re.compile(r"\b(?:[Dd]ropout|torch\.rand\w*|torch\.bernoulli|torch\.normal|multinomial|random\.\w+)\b")


@dataclass(frozen=True, slots=True)
class UserScript:
    """The user's script: its displayed name, and its text."""

    name: str
    text: str


def advise(script: UserScript, compared: Compared, undisturbed: DrillOutcome, disturbed: DrillOutcome) -> list[str]:
    """Describe the difference and what to change, or return [] if there is nothing to report."""
    if undisturbed.problem and _has_ended(undisturbed.events) and not _are_unequal(undisturbed.events):
        named = _suspects(script) if undisturbed.retaken else ()
        return list(dict.fromkeys([*undisturbed.said, *named]))  # the cause with which the job ended explains the rest
    is_survived = not undisturbed.problem and not disturbed.problem
    lacks_commits = never_commits(undisturbed)
    if is_survived and compared.is_equal and not lacks_commits:
        return []
    seen = list(_seen(compared, undisturbed, disturbed))
    if lacks_commits:
        return [*seen, *_without_commits(script)]
    warned = [text for text in dict.fromkeys([*disturbed.said, *undisturbed.said]) if text not in seen]
    suspects = list(_suspects(script))
    differs = bool(compared.difference) and not undisturbed.problem
    if not (warned or suspects) and (differs or _are_unequal(disturbed.events)):
        seen.append("neither the script nor the logs point to a cause; these are the usual causes")
        suspects = list(USUAL)
    return [*seen, *warned, *suspects][:MOST_TOLD]


# ---- from the two jobs


def _seen(compared: Compared, undisturbed: DrillOutcome, disturbed: DrillOutcome) -> Iterator[str]:
    if compared.first_step:
        between = [one for one in disturbed.injected if compared.equal_until <= one.step <= compared.first_step]
        given = "; between them: " + ", ".join(map(_fault_at, between[:3])) if between else ""
        until = f"equal up to step {compared.equal_until}, " if compared.equal_until else ""
        yield f"{until}different at step {compared.first_step}{given}"
    odd = sorted({one.slot for one in compared.differing if one.is_tensor})
    if odd and len(odd) < compared.slots:
        yield (
            f"only rank {', '.join(map(str, odd))} of {compared.slots} differs: what its process alone has, or lacks "
            "since it was restarted, changes its steps"
        )
    others = [one.name for one in compared.differing if not one.is_tensor]
    if others:
        yield f"besides tensors these values of the state differ: {', '.join(dict.fromkeys(others[:8]))}"
    if _are_unequal(disturbed.events) and not _are_unequal(undisturbed.events):
        before = disturbed.injected[-1:]
        after = f", since {_fault_at(before[0])}" if before else ""
        yield f"undisturbed the ranks stay equal, under faults they do not{after}"


def _fault_at(one: Injected) -> str:
    who = f" of {one.node}" if one.node else ""
    return f"{one.fault}{who} at step {one.step}"


def _has_ended(events: Sequence[JobEvent]) -> bool:
    return any(event.kind is EventKind.INTERRUPTED for event in events)


def _are_unequal(events: Sequence[JobEvent]) -> bool:
    return any(event.kind is EventKind.INTERRUPTED and event.more.get("end") == "unequal" for event in events)


def never_commits(outcome: DrillOutcome) -> bool:
    """Return whether the job made no commit before its end, so that every loss returns it to step 0.

    A job that finished before its step was first recorded, within about a second, is judged by its last step.
    """
    before = [event for event in outcome.events if event.kind not in _ENDS]
    is_noted = any(event.kind is EventKind.STEP for event in before) or len(before) == len(outcome.events)
    has_trained = any(event.kind is EventKind.TRAINING for event in before)
    return has_trained and (outcome.last_step == 0 or (is_noted and not any(event.step for event in before)))


# ---- from the script's text


def _tree(script: UserScript) -> ast.Module:
    try:
        return ast.parse(script.text)
    except (SyntaxError, ValueError, RecursionError):
        return ast.Module([], [])


def _without_commits(script: UserScript) -> Iterator[str]:
    calls = _calls(_tree(script))
    at = next((f" after optimizer.step() in line {one.lineno}" for one in calls if _is_step(one)), "")
    if any(_called(one).endswith(".commit") for one in calls):
        yield (
            f"{script.name} has trained and no step was committed: its commit() is never reached. Fix: call "
            f"state.commit(){at}, in every pass of the loop"
        )
    else:
        yield (
            f"{script.name} never calls commit(): it has trained and no step was committed, so a loss takes all of it "
            f"back to the beginning. Fix: call state.commit(){at}"
        )


def _suspects(script: UserScript) -> Iterator[str]:
    tree = _tree(script)
    calls = _calls(tree)
    states = [one for one in calls if _called(one).rpartition(".")[2] == "TorchState"]
    given = {word.arg for one in states for word in one.keywords}
    names = {node.id for one in states for node in ast.walk(one) if isinstance(node, ast.Name)}
    yield from _outside_variables(script.name, tree)
    if states and None not in given:
        yield from _without_sampler(script.name, calls, given)
        yield from _schedules(script.name, tree, names)
        if "rng" not in given and _DRAWS.search(script.text):
            yield (
                f"{script.name}:{states[0].lineno}: the script draws random numbers and TorchState(…) does not say how "
                "they come back. Fix: TorchState(…, rng='per_step', seed=…)"
            )
    steps, commits = [one for one in calls if _is_step(one)], [one for one in calls if _called(one).endswith(".commit")]
    if steps and not commits:
        yield f"{script.name}:{steps[0].lineno}: no commit() follows this step. Fix: call state.commit() after it"


def _without_sampler(name: str, calls: Sequence[ast.Call], given: set[str | None]) -> Iterator[str]:
    if "sampler" in given:
        if not any(_called(one).rpartition(".")[2] in ("record_batch", "record_indices") for one in calls):
            yield (
                f"{name}: the sampler is never told which samples are done. Fix: sampler.record_batch(batch, size) "
                "before state.commit()"
            )
        return
    for one in calls:
        kind = _called(one).rpartition(".")[2]
        shuffles = kind == "DataLoader" and any(
            word.arg == "shuffle" and getattr(word.value, "value", False) for word in one.keywords
        )
        if kind == "ElasticSampler" or kind in _SAMPLERS or shuffles:
            what = f"{kind}(shuffle=True)" if shuffles else kind
            yield (
                f"{name}:{one.lineno}: the position in the data is in no State: after a loss the epoch of this {what} "
                "starts over and samples are taken twice. Fix: sampler = samebits.ElasticSampler(…), "
                "TorchState(…, sampler=sampler), and sampler.record_batch(…) before state.commit()"
            )
            return


def _schedules(name: str, tree: ast.Module, in_state: set[str]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and "lr_scheduler" in _called(node.value):
            for target in node.targets:
                if isinstance(target, ast.Name) and target.id not in in_state:
                    yield (
                        f"{name}:{node.lineno}: the schedule {target.id} is in no State and does not go back. Fix: "
                        f"TorchState(…, {target.id}={target.id})"
                    )


def _outside_variables(name: str, tree: ast.Module) -> Iterator[str]:
    """Yield variables of an outer scope that a training function changes and no state contains.

    The content of each variable is yielded as well.
    """
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef) or not any(map(_is_run, function.decorator_list)):
            continue
        outer = {
            word for node in ast.walk(function) if isinstance(node, ast.Global | ast.Nonlocal) for word in node.names
        }
        local = {one.arg for one in function.args.args} | {
            node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        told: set[str] = set()
        for node in ast.walk(function):
            changed = node.target if isinstance(node, ast.AugAssign) else None
            text = "" if changed is None else ast.unparse(changed)
            root = text.split(".")[0].split("[")[0]
            is_outside = root in outer or (text != root and root not in local | _OWN)
            if changed is not None and is_outside and text not in told:
                told.add(text)
                word = re.sub(r"\W+", "_", text).strip("_")
                yield (
                    f"{name}:{changed.lineno}: {text} is counted outside of the state: it does not go back after a "
                    f"loss and starts over in a new process. Fix: TorchState(…, {word}=0), and state.{word} in its "
                    "place"
                )


def _calls(tree: ast.AST) -> list[ast.Call]:
    found = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return sorted(found, key=_line_of)


def _line_of(call: ast.Call) -> int:
    return call.lineno


def _called(call: ast.Call) -> str:
    return ast.unparse(call.func)


def _is_step(call: ast.Call) -> bool:
    name = _called(call)
    return name.endswith(".step") and "sched" not in name and "scaler" not in name


def _is_run(decorator: ast.expr) -> bool:
    return ast.unparse(decorator).partition("(")[0].endswith("elastic.run")
