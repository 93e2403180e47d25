"""Form, break and drop the process group of one generation, including DDP wrappers, collectives and transfers."""
