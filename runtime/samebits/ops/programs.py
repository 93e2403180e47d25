"""What a job's processes run, made of how the job was started and of today's environment.

Only that mixture lives here. The one idea: of today's environment, whatever the job was started with is replaced by
what it was then; nothing of today's may change what is computed.
"""

from __future__ import annotations

from collections.abc import Mapping

from samebits import config
from samebits.ops.host_launch import is_here
from samebits.ops.kept_start import KeptStart
from samebits.ops.spawning import Program


def program_of(kept: KeptStart, present: Mapping[str, str], secrets: Mapping[str, str]) -> Program:
    """What the job's processes run: of today's environment, ``present``, what the job was started with is replaced.

    ``secrets`` are those of today's that give the job's secret again; any other is taken out.
    """
    surplus = {**config.kept_environment(present), **config.secret_environment(present)}.keys()
    others = {name: text for name, text in present.items() if name not in surplus}
    environment = {**others, **kept.environment, **secrets}
    elsewhere = {node: host for node, host in kept.hosts.items() if not is_here(host)}
    return Program(
        kept.folder, kept.interpreter, kept.script, kept.args, environment, {}, kept.way, elsewhere, job=kept.job
    )
