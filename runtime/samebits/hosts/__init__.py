"""Place workers on the hosts of a cluster, and follow changing sets of hosts."""
