"""Tests on a machine whose disk and network are occasionally slow: see ``__main__``."""
