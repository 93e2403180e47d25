"""The record of a job: its events, and what they add up to."""
