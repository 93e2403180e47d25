"""Send copies of a rank's newest point to another host, and store those of other ranks.

The checkpoint writer process does both.
"""
