"""Select each rank's samples, for samplers, global batches and gradient audits."""
