"""The drill: a user's own script, once undisturbed and once under faults that a seed draws, and the two compared.

``plan`` draws the faults, ``rehearsal`` starts a job, disturbs it and waits, ``compare`` judges the weights and
``command`` puts them together. Never here: how a job recovers. The one idea: the drill is outside of the job, as a
fault is: it uses the same commands as a user and signals only processes that the job's own pid files name.
"""
