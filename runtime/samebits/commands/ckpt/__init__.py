"""``samebits ckpt``: inspect checkpoints without a scheduler and without torch, even while the job trains.

Nothing here writes to the checkpoint folder or locks it, so no command can interfere with a save.
"""
