"""Membership: admission to seats, leases, replacements, and the size of the world."""
