"""Hosts beyond this one: placement of workers in a cluster, and changing sets of hosts."""
