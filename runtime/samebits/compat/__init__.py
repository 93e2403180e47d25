"""Names that other frameworks' users look for, each over a part that the runtime has anyway, and usable without a job.

Nothing is decided here: what a face answers is the core's judgement, and what it reads or writes is the store's. Never
here: pickle, eval, or torch when it is imported.
"""
