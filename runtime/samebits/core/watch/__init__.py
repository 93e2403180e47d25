"""Judgement of the workers' reports: stalls, health, pace, equality, audits."""
