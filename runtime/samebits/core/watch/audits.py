"""Audit gradients (AUDIT=K): choose the ranks that recompute them, and judge the results.

A wrong local gradient reaches all replicas alike, so only a rank that recomputes it can detect the error. Two equal
results out of three decide. A device repeats the same error only if it is defective. These are pure functions;
``training.state.data.audited_batch`` stores the inputs, and ``training.run.gradient_audits`` exchanges the results.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

MOST_AT_ONE_STEP = 2
"""A gradient that differed this often at one step counts as permanently wrong."""


@dataclass(frozen=True, slots=True)
class Roles:
    """The ranks of one audit. ``third`` decides if two differ, and is None in a world of two ranks."""

    audited: int
    auditor: int
    third: int | None


def roles(step: int, every: int, world_size: int) -> Roles | None:
    """Return the ranks' roles at a step, or None if the step is not audited.

    Roles follow from the step alone, so all ranks agree. A world of one rank is never audited.
    """
    if not every or step % every or world_size < 2:
        return None
    first = step // every % world_size
    third = None if world_size == 2 else (first + 2) % world_size
    return Roles(first, (first + 1) % world_size, third)


class AuditResult(enum.Enum):
    """Result of an audit."""

    NOBODY = "all computed the same"
    AUDITED = "two others computed a different gradient"
    AUDITOR = "two computed the same, and the auditor a different one"
    UNKNOWN = "it is unknown which rank is right"
    LOOP = "the stored batch does not reproduce its gradient on any device"


def judge(who: Roles, values: Mapping[int, int], own: int, times: int) -> AuditResult:
    """Return the fault that the results show, or that there is none.

    Args:
        who: roles in the audited step.
        values: each rank's result; the audited rank's from training, the others' recomputed.
        own: the audited rank's recomputed result.
        times: how often this step's gradient differed, including now. A transient error does not differ twice, and a
            defective device is also wrong when it recomputes. Anything else is an error of the training loop.
    """
    audited, auditor = values[who.audited], values[who.auditor]
    third = None if who.third is None else values[who.third]
    if audited == auditor:
        return AuditResult.NOBODY
    if third == audited:
        return AuditResult.AUDITOR
    all_values = [one for one in (audited, auditor, third, own) if one is not None]
    if times >= MOST_AT_ONE_STEP and (own == auditor or len(set(all_values)) == len(all_values)):
        return AuditResult.LOOP
    return AuditResult.AUDITED if third == auditor else AuditResult.UNKNOWN


class Follows(enum.Enum):
    """Consequence of an audit."""

    GO_ON = "the step stands"
    TAKE_AGAIN = "all ranks roll back to the last commit and repeat the step"
    GIVE_UP = "the step stands, and no other is audited"
    STOP = "the job ends"


def follows(fault: AuditResult, times: int) -> Follows:
    """Return the consequence; ``times`` as in :func:`judge`."""
    if fault is AuditResult.LOOP:
        return Follows.GIVE_UP
    if fault in (AuditResult.NOBODY, AuditResult.AUDITOR):  # the auditor's value was not used in any step
        return Follows.GO_ON
    return Follows.TAKE_AGAIN if times < MOST_AT_ONE_STEP else Follows.STOP


def teller(who: Roles, fault: AuditResult) -> int:
    """Return the rank that reports the result to the scheduler: the faulty one, if it is known."""
    return who.auditor if fault is AuditResult.AUDITOR else who.audited


@dataclass(frozen=True, slots=True)
class Known:
    """What is known from earlier audits of the audited rank.

    Attributes:
        clean: the last step at which an audit found its gradient right; 0: none.
        saved: step of the newest checkpoint up to ``clean``; 0: none.
    """

    clean: int = 0
    saved: int = 0


def sentence(who: Roles, fault: AuditResult, part: str, then: Follows) -> str:
    """Describe a difference in a sentence; ``part`` is the first parameter whose gradient differs."""
    again = ", also when the step was repeated" if then is Follows.STOP else ""
    return f"{_what(who, fault, part)}{again}; {then.value}"


def _what(who: Roles, fault: AuditResult, part: str) -> str:
    audited, auditor, third = (f"rank {one}" for one in (who.audited, who.auditor, who.third))
    if fault is AuditResult.AUDITOR:
        return (
            f"{auditor} computed {audited}'s gradient of {part} again and got a different one than {audited} and "
            f"{third}: most likely {auditor}'s device is at fault"
        )
    if fault is AuditResult.AUDITED:
        return (
            f"{audited}'s gradient of {part} is not what {auditor} and {third} compute from the same inputs: most "
            f"likely {audited}'s device is at fault"
        )
    if fault is AuditResult.LOOP:
        return (
            f"{audited}'s gradient of {part} is not what {audited} itself computes from the same inputs, twice: the "
            "loop cannot be audited (a loss that is not an output of the module, or kernels whose bits vary)"
        )
    ranks = ", ".join(str(one) for one in (who.audited, who.auditor, who.third) if one is not None)
    return f"{audited}'s gradient of {part} came out differently on rank {ranks}: it is unknown which rank is right"


def why_it_ends(step: int, text: str, who: Roles, known: Known) -> str:
    """Return the error that ends the job (row ``table.WRONG_GRADIENT``). ``text`` is from :func:`sentence`."""
    return f"step {step}: {text}. {_remedy(who, known)}"


def _remedy(who: Roles, known: Known) -> str:
    if not known.clean:
        return (
            f"No audit in this process has found rank {who.audited}'s gradient right: any step may hold its error. "
            "Fix: test the devices of the named ranks, and restart the job on others"
        )
    since = (
        f"Rank {who.audited}'s gradient was last found right at step {known.clean}: any later step may hold its error"
    )
    if not known.saved:
        return f"{since}, and no checkpoint is that old. Fix: restart the job on other hosts"
    return (
        f"{since}. Fix: `samebits ckpt export 0/{known.saved} clean --format dcp` writes the newest checkpoint that is "
        'that old; a new job on other hosts begins with it by samebits.elastic.load_dcp(state, "clean")'
    )
