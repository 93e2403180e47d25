"""Files, locks and shared memory that must survive ``kill -9``.

This includes the scheduler's journal, the lock on a folder, the marker that names a folder's job, process
identities and the checkpoint format. Nothing here uses torch, sockets, threads or the environment: callers pass bytes,
values and folders.

A file is either complete on disk or absent. Damaged files are detected, reported and kept; they are never loaded or
deleted.
"""
