"""Points in a local folder: found, read, verified, written, packed, pruned, surveyed; never an object store."""
