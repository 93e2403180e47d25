"""A deterministic world for the two cores: a seed determines a run, down to each event.

Real: ``SchedulerCore``, ``AgentCore``, their messages and records, and the journal. Simulated, one file each: time
(``world``), the connections (``network``), the file system below the journal (``disk``), the folder with its lock
(``recovery_path``), restore points (``checkpoints``), the scheduler's loop (``scheduler_host``), the process around an
agent (``worker``), its collectives (``group``), the user or launcher that starts processes (``operator``) and the
faults (``faults``), at rates given by the seed's ``mix``. ``checkers`` only observe: one file for each invariant.
``mutants`` are broken builds that a named checker must catch. ``minimise`` reduces a failing run to what it needs.
Nothing here sleeps, opens a socket or a file, or reads a clock.
"""
