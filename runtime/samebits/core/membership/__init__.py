"""Who holds a seat: admission, leases, replacements, and the size of the world."""
