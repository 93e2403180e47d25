"""``samebits ckpt``: inspect checkpoints without a scheduler and without torch, even while the job trains.

These commands neither write to the checkpoint folder nor lock it, so they cannot interfere with a save.
"""
