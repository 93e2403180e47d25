"""Scripts with mistakes typical of users or frameworks: none ends with two results and status 0."""
