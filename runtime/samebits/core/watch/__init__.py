"""Evaluate the workers' reports: hangs, health, speed, equality of states, and audits."""
