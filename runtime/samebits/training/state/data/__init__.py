"""Which samples a rank takes: sampler, global batch, and the batches of an audit."""
