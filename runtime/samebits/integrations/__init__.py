"""Faces towards other people's training loops, one module each: ``samebits.integrations.accelerate`` and the others.

Each is imported by who uses it, with the extra of the same name installed; what it shows lives in
``samebits.training.integrations``, so that a process that only serves never loads torch.
"""
