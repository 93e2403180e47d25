"""How other people's training loops take part in ours, one module for each framework; each imports only its own.

Never here: a second way of doing anything. The one idea: the framework keeps its calls, and what it wraps, counts or
iterates is either taken for what is inside or made to follow the state.
"""
