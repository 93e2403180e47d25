"""A rank that loads, saves and deletes its points is killed repeatedly; the remains must always be complete."""
