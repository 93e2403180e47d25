"""Whole jobs with real processes: every promise of a job that is killed and comes back, tried on the running thing.

Here live the harness (``job``, ``scripted``, ``processes``, ``warm_start``), the training script that kills itself
where it is told to (``probe``, ``kill_points``), the kill list (``kill_list``) and one test module a promise. Never
here: a reach into a process's memory, or a promise that a pure test can keep. The one idea: a job is judged by what its
processes say and leave behind (logs, exit statuses, pids, folders), and the measure is one sha256: the undisturbed
run's.
"""
