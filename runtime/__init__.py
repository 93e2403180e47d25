"""Not the package: ``runtime/`` holds its source, and ``samebits`` is what a program imports."""

raise ImportError("the package is called samebits: write `import samebits` instead of `import runtime`")
