"""APIs with the names of other frameworks, built on parts of the runtime. They can be used without a job.

``core`` makes the decisions, and ``store`` writes the files. Importing the package does not load torch, and nothing is
pickled or evaluated.
"""
