"""Scripts that are wrong in a user's or a framework's way: none of them ends with two results and status 0."""
