"""Subcommands of ``samebits``, a file or a folder each."""
