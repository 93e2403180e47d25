"""Hosts beyond this one: who runs where in a cluster, and hosts that come and go."""
