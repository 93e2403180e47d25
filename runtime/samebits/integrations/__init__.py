"""Adapters for other training loops, one module each, such as ``samebits.integrations.accelerate``.

Each needs the extra of the same name. The code is in ``samebits.training.integrations``, so that a scheduler never
loads torch.
"""
