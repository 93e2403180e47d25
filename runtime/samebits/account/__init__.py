"""The record of a job: its events, and statistics computed from them."""
