"""The user's script: what its loop reads, changes and hides from the state."""
