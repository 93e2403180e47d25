"""AROUND the job: what starts it, watches it, brings it back and shows it; the command line's subcommands live here.

Never here: a decision about membership (the core's), the scheduler's or a worker's own loop, torch. The one idea:
whoever starts processes is a follower, who judges by the scheduler and its journal and owns no more than pid files.
"""
