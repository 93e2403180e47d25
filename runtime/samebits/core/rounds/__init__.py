"""Rounds in which members form a generation, durable restore points, and the first losses of generations."""
