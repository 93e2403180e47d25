"""The process group of one generation: formed, broken and dropped, with the DDP wrappers, collectives and transfers in
it."""
