"""SameBits: keep PyTorch training running when any process dies.

Public names are imported on first use, so that a scheduler never loads torch::

    import samebits
    samebits.init()
    state = samebits.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0)

    @samebits.elastic.run
    def train(state): ...
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from samebits import start_folder as start_folder  # before the script can change to another folder

if TYPE_CHECKING:
    from samebits.compat.checkpoints import CheckpointRecovery as CheckpointRecovery
    from samebits.compat.checkpoints import ModelCheckpoint as ModelCheckpoint
    from samebits.compat.consistency import ConsistencyProtocol as ConsistencyProtocol
    from samebits.compat.consistency import ConsistencyRecovery as ConsistencyRecovery
    from samebits.compat.consistency import StateSynchronization as StateSynchronization
    from samebits.compat.model import Model as Model
    from samebits.compat.monitors import HealthChecker as HealthChecker
    from samebits.compat.monitors import HeartbeatDetector as HeartbeatDetector
    from samebits.compat.monitors import LossMonitor as LossMonitor
    from samebits.training import elastic as elastic
    from samebits.training.process import key_value as kv  # noqa: F401
    from samebits.training.process.context import get_local_rank as get_local_rank
    from samebits.training.process.context import get_rank as get_rank
    from samebits.training.process.context import get_world_size as get_world_size
    from samebits.training.process.context import init as init
    from samebits.training.process.context import is_spare as is_spare
    from samebits.training.process.job_status import JobStatus as JobStatus
    from samebits.training.process.job_status import report as report
    from samebits.training.process.job_status import status as status
    from samebits.training.process.work_queue import WorkQueue as WorkQueue
    from samebits.training.run.main_thread_probe import expect_pause as expect_pause
    from samebits.training.state.checkpoint_config import CheckpointConfig as CheckpointConfig
    from samebits.training.state.checkpoint_config import StepLog as StepLog
    from samebits.training.state.data.global_batch import GlobalBatch as GlobalBatch
    from samebits.training.state.data.sampler import ElasticSampler as ElasticSampler

__version__ = "0.1.0"

_HOME = {
    name: f"samebits.{module}"
    for module, names in (
        ("compat.checkpoints", "CheckpointRecovery ModelCheckpoint"),
        ("compat.consistency", "ConsistencyProtocol ConsistencyRecovery StateSynchronization"),
        ("compat.model", "Model"),
        ("compat.monitors", "HealthChecker HeartbeatDetector LossMonitor"),
        ("training.elastic", "elastic"),
        ("training.process.context", "get_local_rank get_rank get_world_size init is_spare"),
        ("training.process.job_status", "JobStatus report status"),
        ("training.process.key_value", "kv"),
        ("training.process.work_queue", "WorkQueue"),
        ("training.run.main_thread_probe", "expect_pause"),
        ("training.state.checkpoint_config", "CheckpointConfig StepLog"),
        ("training.state.data.global_batch", "GlobalBatch"),
        ("training.state.data.sampler", "ElasticSampler"),
    )
    for name in names.split()
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'samebits' has no attribute {name!r}")
    home = importlib.import_module(_HOME[name])
    return home if name in ("elastic", "kv") else getattr(home, name)
