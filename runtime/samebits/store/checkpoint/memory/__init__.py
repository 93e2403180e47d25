"""Points in shared memory that outlives their process: a rank's two buffers, sealed, hashed, copied to other hosts."""
