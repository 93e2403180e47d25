"""Keep a job's journal in etcd, where it survives the loss of any minority of the hosts.

``gateway`` sends requests, ``etcd_journal`` keeps one journal there, ``event_copy`` keeps the history, and ``serving``
announces which scheduler serves the job. ``store.journal`` writes to both etcd and a copy of the journal in a
folder; everything else reads that copy.
"""
