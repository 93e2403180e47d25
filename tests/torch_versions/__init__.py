"""Other versions of torch than the one installed here: each in an environment of its own, probed, tested and killed.

Which versions is ``samebits.training.torch_versions.TRIED``'s affair, what each showed the README's.
"""
