"""One call of a training function through all its generations, and what keeps it quick and watched meanwhile.

Never here: how a group is made, how a state is saved: ``run`` tells the rooms below when to do it.
"""
