"""Complete jobs with real processes: every promise about a job that is killed and recovers.

The harness is in ``job``, ``scripted``, ``processes`` and ``warm_start``. ``probe`` is the training script that kills
itself on request (``kill_points``); ``kill_list`` has the kills. There is one test module per promise. A job is judged
by what its processes print and leave behind (logs, exit statuses, pids, folders), and its result by the sha256 of the
undisturbed run. Promises that a pure test can check are not tested here.
"""
