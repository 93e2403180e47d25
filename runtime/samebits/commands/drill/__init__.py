"""The drill: run a user's script undisturbed, then under faults that a seed draws, and compare the two.

``plan`` draws the faults, ``rehearsal`` runs one job and gives them, ``outcome`` holds what became of it, ``compare``
judges the weights, and ``command`` puts them together. The drill stays outside the job, as a fault does: it uses the
commands that a user would, and signals only processes that the job's own pid files name.
"""
