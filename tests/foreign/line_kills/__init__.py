"""Whole training scripts of public shapes, killed at a drawn line of their own: the undisturbed bits, or a refusal."""
