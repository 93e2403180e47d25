"""APIs under the names of other frameworks, over parts of the runtime; usable without a job.

Decisions are those of ``core``, files are written by ``store``. Importing the package does not load torch, and nothing
is pickled or evaluated.
"""
