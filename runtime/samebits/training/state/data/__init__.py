"""Choose the samples of a rank: sampler, global batch, and the batches of an audit."""
