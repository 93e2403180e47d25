"""``samebits ckpt``: inspect checkpoints without a scheduler and without torch, even while the job trains.

Nothing here writes to the checkpoint folder or takes a lock there, so it cannot interfere with a save.
"""
