"""A job's journal in an etcd: it survives the loss of any minority of the etcd's hosts.

``gateway`` sends requests, ``log`` keeps one journal there, and ``mirrored_journal`` keeps a copy of it in a folder,
which is what everything else reads.
"""
