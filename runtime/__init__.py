"""SameBits: a PyTorch training job that kill -9 cannot end.

The public names; each is imported when it is first used, so that a scheduler never loads torch::

    import runtime
    runtime.init()
    state = runtime.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0)

    @runtime.elastic.run
    def train(state): ...
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.faces.checkpoints import CheckpointRecovery as CheckpointRecovery
    from runtime.faces.checkpoints import ModelCheckpoint as ModelCheckpoint
    from runtime.faces.consistency import ConsistencyProtocol as ConsistencyProtocol
    from runtime.faces.consistency import ConsistencyRecovery as ConsistencyRecovery
    from runtime.faces.consistency import StateSynchronization as StateSynchronization
    from runtime.faces.health import HealthChecker as HealthChecker
    from runtime.faces.heartbeats import HeartbeatDetector as HeartbeatDetector
    from runtime.faces.losses import LossMonitor as LossMonitor
    from runtime.faces.model import Model as Model
    from runtime.training import elastic as elastic
    from runtime.training.process import key_value as kv
    from runtime.training.process.context import get_local_rank as get_local_rank
    from runtime.training.process.context import get_rank as get_rank
    from runtime.training.process.context import get_world_size as get_world_size
    from runtime.training.process.context import init as init
    from runtime.training.process.context import is_spare as is_spare
    from runtime.training.process.figures import report as report
    from runtime.training.process.job_status import JobStatus as JobStatus
    from runtime.training.process.job_status import status as status
    from runtime.training.process.work_queue import WorkQueue as WorkQueue
    from runtime.training.run.whereabouts import expect_pause as expect_pause
    from runtime.training.state.checkpoint_config import CheckpointConfig as CheckpointConfig
    from runtime.training.state.checkpoint_config import StepLog as StepLog
    from runtime.training.state.global_batch import GlobalBatch as GlobalBatch
    from runtime.training.state.sampler import ElasticSampler as ElasticSampler

_HOME = {
    "CheckpointConfig": "runtime.training.state.checkpoint_config",
    "CheckpointRecovery": "runtime.faces.checkpoints",
    "ConsistencyProtocol": "runtime.faces.consistency",
    "ConsistencyRecovery": "runtime.faces.consistency",
    "ElasticSampler": "runtime.training.state.sampler",
    "GlobalBatch": "runtime.training.state.global_batch",
    "HealthChecker": "runtime.faces.health",
    "HeartbeatDetector": "runtime.faces.heartbeats",
    "JobStatus": "runtime.training.process.job_status",
    "LossMonitor": "runtime.faces.losses",
    "Model": "runtime.faces.model",
    "ModelCheckpoint": "runtime.faces.checkpoints",
    "StateSynchronization": "runtime.faces.consistency",
    "StepLog": "runtime.training.state.checkpoint_config",
    "WorkQueue": "runtime.training.process.work_queue",
    "elastic": "runtime.training.elastic",
    "expect_pause": "runtime.training.run.whereabouts",
    "get_local_rank": "runtime.training.process.context",
    "get_rank": "runtime.training.process.context",
    "get_world_size": "runtime.training.process.context",
    "init": "runtime.training.process.context",
    "is_spare": "runtime.training.process.context",
    "kv": "runtime.training.process.key_value",
    "report": "runtime.training.process.figures",
    "status": "runtime.training.process.job_status",
}

__all__ = [
    "CheckpointConfig",
    "CheckpointRecovery",
    "ConsistencyProtocol",
    "ConsistencyRecovery",
    "ElasticSampler",
    "GlobalBatch",
    "HealthChecker",
    "HeartbeatDetector",
    "JobStatus",
    "LossMonitor",
    "Model",
    "ModelCheckpoint",
    "StateSynchronization",
    "StepLog",
    "WorkQueue",
    "elastic",
    "expect_pause",
    "get_local_rank",
    "get_rank",
    "get_world_size",
    "init",
    "is_spare",
    "kv",
    "report",
    "status",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'runtime' has no attribute {name!r}")
    home = importlib.import_module(_HOME[name])
    return home if name in ("elastic", "kv") else getattr(home, name)
