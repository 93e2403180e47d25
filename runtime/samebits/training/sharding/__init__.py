"""Tensors that no rank holds completely: DTensors, and the FSDP2 modules that create them.

``pieces`` describes one rank's shard for a checkpoint, ``regrouping`` moves FSDP2 modules from one generation's group
to the next, and ``whole`` joins the shards of all ranks. Importing torch's DTensor modules is slow, so no module here
imports them: a script with a DTensor has imported them already.
"""
