"""How long a node may be silent, learned from how its messages came so far: an accrual detector. Pure.

Here lives one node's arrivals and the patience that follows. Never here: leases. After Hayashibara and others, "The φ
accrual failure detector" (SRDS 2004): φ is minus the decimal logarithm of the probability that a message comes later
yet, if gaps are normally distributed. The one idea: of a node that came every second by the clock three seconds of
silence say more than of one whose messages are lost now and then; but a pause that never was before is no death, and
this detector takes it for one, so it is no default.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

PHI = 8.0
"""A silence is a death where a message would still come with a probability of 10^-8 only."""
WEIGHT = 1 / 32
"""Of the newest gap; older ones fade."""
FEWEST = 16
"""Before so many gaps are known, nothing is concluded from them."""
LEAST_DEVIATION = 0.1
"""Of the mean: no clock and no network is more regular than that."""
COUNTED = 0.5
"""Of the heartbeat's interval: what comes sooner is another message, between two heartbeats."""
MOST_LEASES = 2.0
"""A patience is at most so many times NODE_TIMEOUT, however irregular the messages came; at least two heartbeats."""
_DEVIATIONS = -NormalDist().inv_cdf(10**-PHI)


@dataclass(slots=True)
class Arrivals:
    """Of one node's session."""

    count: int = 0
    mean_s: float = 0.0
    variance: float = 0.0

    def take(self, gap_s: float) -> None:
        """A heartbeat came so long after the one before."""
        self.count += 1
        weight = max(WEIGHT, 1 / self.count)
        off = gap_s - self.mean_s
        self.mean_s += weight * off
        self.variance = (1 - weight) * (self.variance + weight * off * off)

    def patience_s(self, heartbeat_interval_s: float, node_timeout_s: float) -> float:
        """How long a silence is no death yet; NODE_TIMEOUT as long as little is known."""
        if self.count < FEWEST:
            return node_timeout_s
        deviation_s = max(math.sqrt(self.variance), LEAST_DEVIATION * self.mean_s)
        patience_s = self.mean_s + _DEVIATIONS * deviation_s
        return min(max(patience_s, 2 * heartbeat_interval_s), MOST_LEASES * node_timeout_s)
