"""Place workers on the hosts of a cluster, and follow changes of the set of hosts."""
