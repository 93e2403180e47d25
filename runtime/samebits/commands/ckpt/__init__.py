"""``ckpt``: looking at checkpoints, while the job trains or after it, without its scheduler and without torch.

One module for each thing that can be done (``listing``, ``verifying``, ``showing``, ``exporting``), and beside them
what a point is called on the command line and how values are told to people. The one idea: nothing here writes into the
checkpoint folder or takes a lock there, so it can never be in the way of a save.
"""
