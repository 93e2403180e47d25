"""A job that fails in every known way, and whether its first cause is named correctly."""
