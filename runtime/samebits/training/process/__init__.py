"""This process's place in the job: the one context behind ``samebits.init()``, its signals, numerics and exit status.

Never here: what happens inside a training function, and what a state is.
"""
