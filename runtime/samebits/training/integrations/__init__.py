"""Integrations for other training frameworks; each module imports only its own framework.

Scripts keep the framework's calls. Its wrappers are unwrapped where needed, and its counters and loaders follow the
state.
"""
