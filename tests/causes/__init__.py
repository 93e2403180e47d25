"""A job that fails in every way that is known, and whether its first cause is named right each time."""
