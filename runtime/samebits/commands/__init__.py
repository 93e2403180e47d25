"""Subcommands of ``samebits``, one file or folder each."""
