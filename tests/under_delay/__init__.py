"""Tests on a machine whose disk and network take their time, now and then: see ``__main__``."""
