"""Integrations of other training frameworks, one module each, which imports only its own framework.

The framework's calls stay as they are. Its wrappers are unwrapped where needed, and its counters and loaders follow the
state.
"""
