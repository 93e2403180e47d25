"""The drill: run a user's script undisturbed, then under faults drawn from a seed, and compare the two runs.

``plan`` draws the faults and holds the results, ``rehearsal`` runs one job and injects the faults, ``compare`` compares
the weights, and ``command`` combines them. The drill stays outside the job, as a fault does: it uses the
commands that a user would, and signals only processes that the job's own pid files name.
"""
