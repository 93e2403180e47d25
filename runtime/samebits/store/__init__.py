"""MEMORY: what outlives kill -9, and how it is found again.

Here live the journal of the scheduler, the lock of a folder's one writer, the marker of the job a folder belongs to,
the identity of a process, and the format of a checkpoint. Never here: torch, sockets, threads, the environment, and any
decision about what is worth remembering; callers hand in bytes, values and folders. The one idea: a thing is either on
disk whole or not there, and whatever was damaged since is noticed, named and kept: never loaded, never deleted.
"""
