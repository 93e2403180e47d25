"""The scheduler's keys (``samebits.kv``) and the work queue built on them."""
