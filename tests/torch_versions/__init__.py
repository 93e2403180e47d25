"""Other torch versions than the installed one: each in its own environment, probed, tested and killed.

``samebits.training.torch_private.TRIED`` lists the versions, docs/reference/support-matrix.md their results.
"""
