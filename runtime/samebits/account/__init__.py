"""The record of a job: its events, and the statistics computed from them."""
