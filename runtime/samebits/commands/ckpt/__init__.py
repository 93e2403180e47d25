"""``samebits ckpt``: look at checkpoints without a scheduler and without torch, also while the job trains.

Nothing here writes into the checkpoint folder or takes a lock there, so it cannot get in the way of a save.
"""
