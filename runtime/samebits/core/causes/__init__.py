"""Causes of losses: their table, the remedy each calls for, and the budget of restarts."""
