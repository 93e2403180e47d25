"""Points in an object store: the contract of a local folder without rename, fsync or locks."""
