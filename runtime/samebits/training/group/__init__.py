"""Form, break and drop one generation's process group, with its DDP wrappers, collectives and transfers."""
