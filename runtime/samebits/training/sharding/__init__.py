"""Tensors that no rank holds completely: DTensors, and the FSDP2 modules that create them.

``pieces`` describes one rank's part for a point, ``regrouping`` moves FSDP2 modules from one generation's group to the
next, and ``whole`` joins the pieces of all ranks. Importing torch's DTensor modules takes a good part of a second, so
no module here imports them: a script with a DTensor has imported them already.
"""
