"""The history of a job: its events, and statistics computed from them."""
