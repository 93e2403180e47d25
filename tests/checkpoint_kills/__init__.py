"""A rank that loads, saves and deletes its points, killed again and again: what is left must always be whole."""
