"""This process's part in the job: the context behind ``samebits.init()``, its signals, numerics and exit status."""
