"""Jobs on a device mesh, killed at drawn moments: the undisturbed bits, surviving processes and few steps redone."""
