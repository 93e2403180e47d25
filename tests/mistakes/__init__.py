"""Mistakes that people make with their first job, and what they are told: each a row of a table, with real processes.

The measure of a row is what a person reads: the sentence with its file and line, the remedy after "Fix:", the exit
status, and that the job does not go on, or not end, because of it. A row that needs no process is in the tests of the
room that speaks (``tests/config``, ``tests/launcher``).
"""
