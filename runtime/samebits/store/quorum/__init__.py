"""A job's journal in an etcd: it survives the loss of any minority of the etcd's hosts.

``gateway`` sends requests, ``log`` keeps one journal there, ``event_copy`` keeps the history, and ``serving`` tells
which scheduler serves the job. ``store.journal`` writes to both the etcd and a copy of the journal in a folder,
which is what everything else reads.
"""
