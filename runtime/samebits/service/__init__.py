"""The loops that carry out the cores' decisions with the real clock, without torch."""
