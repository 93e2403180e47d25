"""Adapters for other training loops, one module each, such as ``samebits.integrations.accelerate``.

Each needs the extra of the same name and imports only its own framework. Scripts keep the framework's calls. Its
wrappers are unwrapped where needed, and its counters and loaders follow the state.
"""
