"""Complete public-style training scripts, killed at a random line: the undisturbed bits, or a refusal."""
