"""The process group of one generation: made, broken, left, and what rides on it (DDP, collectives, transfers).

Never here: when a generation begins, and what a state is. Other rooms of ``training`` stand on this one.
"""
