"""Other versions of torch than the one installed here: each in an environment of its own, probed, tested and killed.

``samebits.training.torch_versions.TRIED`` lists the versions, docs/reference/support-matrix.md their results.
"""
