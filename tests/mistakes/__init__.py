"""Common mistakes with a first job and the message for each: rows of a table, run with real processes.

A row checks what a user reads: the sentence with its file and line, the remedy after "Fix:", the exit status, and that
the job does not continue, or end, because of it. Rows that need no process are in the tests of the package that prints
the message (``tests/config``, ``tests/launcher``).
"""
