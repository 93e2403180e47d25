"""Shard groups: the sets of slots by which a world with a device mesh shrinks and grows.

A rank's process holds the part of its slot and cannot take another part. A generation therefore consists of whole shard
groups, each of which holds every part. If a slot of a group is vacant, the others keep their seats and wait.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from samebits.core.ledger import Policy
from samebits.core.messages import Sharding


class ShardGroups:
    """The shard groups of one world at one moment.

    Args:
        mesh: the whole mesh, one of whose dimensions shrinks.
        held: the slots with a holder.
        absent: those of them whose holder is not considered alive.

    Attributes:
        complete: present slots whose group is complete.
    """

    def __init__(self, mesh: Sharding, held: Collection[int], absent: Collection[int]) -> None:
        self._mesh = mesh
        members: dict[int, list[int]] = {}
        for slot in held:
            if slot not in absent:
                members.setdefault(mesh.group_of(slot), []).append(slot)
        self._present: Mapping[int, list[int]] = members
        self.complete = frozenset(slot for slots in members.values() if len(slots) == mesh.group_size for slot in slots)

    def beside(self, slots: Collection[int]) -> set[int]:
        """Return the present slots of the groups to which these slots belong."""
        return {one for group in set(map(self._mesh.group_of, slots)) for one in self._present.get(group, ())}

    def vacancies(self, slot: int) -> int:
        """Return how many slots of this slot's group have no holder that is considered alive."""
        return self._mesh.group_size - len(self._present.get(self._mesh.group_of(slot), ()))


def mesh_for(policy: Policy, sharding: Sharding | None) -> Sharding | None:
    """Return the mesh by whose shard groups the world may shrink, or None if the mesh or the job has no such groups."""
    if sharding is None or sharding.shrinks is None or not policy.is_elastic:
        return None
    sizes, replicates, shrinks = sharding.sizes, sharding.replicates, sharding.shrinks
    fits = len(sizes) == len(replicates) and shrinks < len(sizes) and replicates[shrinks]
    return sharding if fits and math.prod(sizes) == policy.max_world_size else None
