"""Inspect the user's script: what its loop reads, changes, and keeps outside the state."""
