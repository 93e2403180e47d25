"""Classify the causes of losses: the table of causes, their remedies, and limits on restarts."""
