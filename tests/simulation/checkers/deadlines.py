"""The bounds of L1–L5: the sum of all permitted waits once faults have stopped.

A lease and a cool-down that start when the faults stop, both again if the job itself had just been ended and its
processes start afresh, and the slowest process's preparations; all by the slowest clock there is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.world import World

HEARTBEAT_INTERVAL_S = 1.0
SOME_MESSAGES_S = 0.5
END_GRACE_S = 10.0
SLACK_S = 20.0


def slowest(world: World) -> float:
    """True seconds in one second of the slowest clock."""
    return 1.0 / (1.0 - world.mix.clock_spread)


def together_s(world: World) -> float:
    """Bound from the last fault to the first step of all."""
    policy, mix = world.policy, world.mix
    once = policy.cool_down_s + 3 * policy.node_timeout_s
    graces_s = grows_s = 0.0
    if policy.is_elastic:
        graces_s, grows_s = policy.start_grace_s + 2 * policy.shrink_grace_s, advanced_s(world)
    holds = [one for one in world.workers if world.operator.leaves_held(one) is not None]
    hangs_s = max((world.patience.most_s(one.step) for one in holds), default=0.0)
    return slowest(world) * (2 * once + END_GRACE_S + graces_s) + 2 * mix.prepares_s + grows_s + hangs_s + SLACK_S


def advanced_s(world: World) -> float:
    """Bound from the first common step to a durable point newer than the one they started from."""
    mix = world.mix
    return (mix.save_every + 1) * mix.step_s + 2 * mix.saves_s + SLACK_S


def finished_s(world: World) -> float:
    """Bound from the first common step to the last process's end, or else from TOPO_TIMEOUT after the job's."""
    policy, mix = world.policy, world.mix
    waits = 2 * policy.topo_timeout_s + policy.cool_down_s + 5 * policy.node_timeout_s
    return mix.target_step * mix.step_s + mix.saves_s + slowest(world) * waits + SLACK_S


def people(world: World) -> str:
    """Describe where all processes are, for a violation's text."""
    return "; ".join(
        f"{worker} {worker.stage.value}, agent {worker.agent.activity.name}, generation {worker.generation}"
        for worker in world.workers
    )
