"""A deterministic world for the two cores: one seed is one run, reproducible to the event.

Real: ``SchedulerCore``, ``AgentCore``, their messages and records, and the journal. Simulated, a file each: time
(``world``), the connections (``network``), the file system below the journal (``disk``), the folder with its lock
(``recovery_path``), restore points (``checkpoints``), the scheduler's loop (``scheduler_host``), the process around an
agent (``worker``), its collectives (``group``), whoever starts processes (``operator``) and what goes wrong
(``faults``), as often as the seed's ``mix`` says. ``checkers`` watch and never take part: one file for each invariant.
``mutants`` are broken builds that a named checker must catch. ``minimise`` cuts a failing run down to what it needs.
Nothing here sleeps, opens a socket or a file, or reads a clock.
"""
