"""A deterministic world for the two cores: one seed is one run, reproducible to the event (DESIGN section 9).

Real: ``SchedulerCore``, ``AgentCore``, their messages and records. Simulated, a file each: time (``world``), the
connections (``network``), journal and checkpoints (``disk``), the scheduler's loop (``scheduler_host``), the process
around an agent (``worker``), its collectives (``group``), whoever starts processes (``operator``) and what goes wrong
(``faults``). ``checkers`` watch and never take part: one file per group of invariants. ``mutants`` are broken cores
that a named checker must catch. Nothing here sleeps, opens a socket or a file, or reads a clock.
"""
