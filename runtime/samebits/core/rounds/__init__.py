"""Rounds: meetings of members, durable restore points, and first losses of generations."""
