"""The record of a job: its events, how its time was used, and its state at one moment. No user accounts."""
