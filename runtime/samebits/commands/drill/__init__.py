"""The drill: run a user's script undisturbed, then under faults drawn from a seed, and compare the two runs.

``plan`` draws the faults, ``rehearsal`` runs one job and injects them, ``outcome`` holds the results, ``compare``
compares the weights, and ``command`` combines them. The drill stays outside the job, as a fault does: it uses the
commands that a user would, and signals only processes that the job's own pid files name.
"""
