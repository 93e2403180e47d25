"""Causes of losses: the table of causes, the remedy for each, and the restart budget."""
