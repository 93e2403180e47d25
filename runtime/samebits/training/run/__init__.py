"""Run a training function through all generations of its job, and tune, watch and audit the run."""
