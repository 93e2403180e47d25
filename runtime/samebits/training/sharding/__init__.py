"""Tensors that no rank holds whole: DTensors, and the FSDP2 modules that make them.

``pieces`` is what one rank holds of them, as it goes into a point and comes back; ``regrouping`` takes FSDP2 modules
from one generation's group to the next; ``whole`` puts the pieces of all ranks together again. Never here: when any of
that happens, files. The one idea: torch's modules for DTensors cost a process a good part of a second at its start, so
nothing here imports them: whoever has a DTensor has imported them already, and that is how it is seen.
"""
