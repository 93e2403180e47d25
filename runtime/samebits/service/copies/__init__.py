"""Send copies of a rank's newest point to another host, and keep those of other ranks.

The writer process does both.
"""
