"""This process as a member of the job: ``samebits.init()``, signals, numerics and exit status."""
