"""Broken builds, one fault each, with the checker that must name it, since a simulation that cannot fail proves
nothing.

There are mutants of the core, of its worlds, of rebuilt jobs, of committed points, of equal ranks, of the detectors, of
the keys, of the agent, of the journal and of a journal in an etcd, one file each. A mutant that survives is a defect of
the simulator.
"""

from __future__ import annotations

from tests.simulation.mutants import (
    of_agent,
    of_core,
    of_detectors,
    of_equality,
    of_journal,
    of_keys,
    of_points,
    of_quorum,
    of_rebuild,
    of_worlds,
)
from tests.simulation.mutants.mutant import Mutant, store_seeds, stored_seeds

MUTANTS: tuple[Mutant, ...] = (
    *of_core.MUTANTS,
    *of_worlds.MUTANTS,
    *of_rebuild.MUTANTS,
    *of_points.MUTANTS,
    *of_equality.MUTANTS,
    *of_detectors.MUTANTS,
    *of_keys.MUTANTS,
    *of_agent.MUTANTS,
    *of_journal.MUTANTS,
    *of_quorum.MUTANTS,
)

__all__ = ["MUTANTS", "Mutant", "store_seeds", "stored_seeds"]
