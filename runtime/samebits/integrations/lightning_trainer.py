"""Lightning's ``Trainer``, whose ``fit()`` continues from the last commit after a loss.

A commit happens right before the next batch is fetched. So everything that follows from a step (an evaluation, early
stopping, the end of an epoch) belongs to that step, and is repeated with it after a loss. Places and wrappers are those
of the Fabric integration.

This relies on private parts of Lightning: the two loops of ``fit()``, their counters, and their use of
``restarted_mid_epoch`` to find out whether an epoch has already begun.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.data_connector import _parse_num_batches
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import DataLoader, DistributedSampler

from samebits.errors import UsageError
from samebits.integrations.lightning import seat, take_place
from samebits.integrations.training_loader import (
    FollowingState,
    batches_left,
    batches_of,
    elastic_parts,
    is_for_training,
    numbered,
)
from samebits.training import elastic
from samebits.training.process import context
from samebits.training.state.checkpoint_config import CheckpointConfig
from samebits.training.state.torch_state import TorchState

__all__ = ["Trainer", "TrainerStrategy"]


class Trainer(LightningTrainer):
    """Lightning's Trainer. ``fit()`` is the training function, and every optimizer step ends with a commit.

    A training loader that shuffles, or has an :class:`samebits.ElasticSampler`, continues in the middle of an epoch
    after a loss. ``on_train_start`` and ``on_train_epoch_start`` are then called again, and values that a module logs
    for a whole epoch are averages since then.

    Args:
        checkpoint: how often to save the state. Lightning's own checkpoints still work but are not needed.
        kwargs: as for Lightning.

    Raises:
        UsageError: ``samebits.init()`` was not called, or something unsupported was requested.
    """

    def __init__(self, *, checkpoint: CheckpointConfig | None = None, **kwargs: Any) -> None:
        context.current("samebits.integrations.lightning.Trainer()")
        strategy = kwargs.pop("strategy", "auto")
        if not isinstance(strategy, TrainerStrategy):
            if strategy not in ("auto", "ddp"):
                raise _not_carried(
                    f"strategy={strategy!r}",
                    "leave it out, or give a TrainerStrategy, which takes DDPStrategy's arguments",
                )
            strategy = TrainerStrategy()
        self._checkpoint = checkpoint
        self._elastic: TorchState | None = None
        self._training_loaders: list[_EpochLoader] = []
        self._divided: list[DistributedSampler[Any]] = []  # samplers that Lightning made for this process's place
        super().__init__(strategy=strategy, **kwargs)
        if self.reload_dataloaders_every_n_epochs:
            raise _not_carried(
                "reload_dataloaders_every_n_epochs", "let the dataset choose its samples by the sampler's epoch"
            )
        self.fit_loop.__class__ = _Epochs  # the attributes are the same
        self.fit_loop.epoch_loop.__class__ = _Batches
        self._lightnings_loader = self._data_connector._prepare_dataloader
        self._data_connector._prepare_dataloader = self._prepare_dataloader
        # The runtime handles signals that ask a worker to leave; Lightning's handler would broadcast.
        self._signal_connector.register_signal_handlers = lambda: None

    def fit(self, *args: Any, ckpt_path: Any = None, **kwargs: Any) -> None:
        """Train as Lightning does. After an interruption, the job resumes by itself.

        Raises:
            UsageError: ``ckpt_path`` is given, or no training loader has a position that can be saved.
        """
        if ckpt_path is not None:
            raise _not_carried("fit(ckpt_path=…)", "leave it out: a job resumes by itself")
        super().fit(*args, **kwargs)

    def _prepare_dataloader(self, dataloader: Any, shuffle: bool, mode: RunningStage) -> Any:
        if mode is not RunningStage.TRAINING:
            prepared = self._lightnings_loader(dataloader, shuffle, mode)
            if isinstance(getattr(prepared, "sampler", None), DistributedSampler):
                self._divided.append(prepared.sampler)
            return prepared
        if not is_for_training(dataloader):
            raise _not_carried(
                f"a training loader with a {type(getattr(dataloader, 'sampler', dataloader)).__name__}, which has no "
                "position that can be saved,",
                "give a DataLoader with shuffle=True or with sampler=samebits.ElasticSampler(data, shuffle=False)",
            )
        loader = _EpochLoader(dataloader)
        self._training_loaders.append(loader)
        return loader

    def _run_stage(self) -> Any:
        if self.state.fn is not TrainerFn.FITTING:
            return super()._run_stage()
        self.fit_loop.setup_data()
        # Done here, where no collective is needed: a newcomer could not join a collective of the older ranks.
        self.validating = True
        self.fit_loop.epoch_loop.val_loop.setup_data()
        self.training = True
        schedules = [one.scheduler for one in self.strategy.lr_scheduler_configs]
        self._elastic = FollowingState(
            self._follow,
            model=self.strategy.model,
            **numbered("optimizer", self.strategy.optimizers),
            **numbered("schedule", schedules),
            **numbered("sampler", [one.elastic_sampler for one in self._training_loaders]),
            progress=_Progress(self),
            checkpoint=self._checkpoint,
        )

        def train(_: TorchState) -> None:
            self._begin_again()
            if self._elastic is not None and not self._elastic.completed_steps:
                with isolate_rng():
                    self._run_sanity_check()
            with torch.autograd.set_detect_anomaly(self._detect_anomaly):
                self.fit_loop.run()

        elastic.run(train)(self._elastic)
        self._elastic = None
        return None

    def _follow(self) -> None:
        take_place(self._divided)

    def _begin_again(self) -> None:
        """Reset everything that a loss may have interrupted to its state between two steps."""
        batches, module = self.fit_loop.epoch_loop, self.lightning_module
        if self.state.stage is not RunningStage.TRAINING:  # an evaluation was interrupted
            batches.val_loop._module_mode.restore(module)
        self.training = True
        module._current_fx_name = None
        for parameter, requires_grad in module._param_requires_grad_state.items():  # an optimizer may have been toggled
            parameter.requires_grad = requires_grad
        module._param_requires_grad_state = {}
        module.zero_grad()
        self._logger_connector.reset_results()
        self._logger_connector.reset_metrics()
        self.fit_loop.has_begun = batches.has_begun = self.fit_loop.epoch_progress.current.ready > (
            self.fit_loop.epoch_progress.current.processed
        )
        batches.committed = self.global_step


class TrainerStrategy(DDPStrategy):
    """Lightning's DDP strategy in existing processes.

    Args:
        kwargs: as for ``lightning.pytorch.strategies.DDPStrategy``.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(cluster_environment=seat(), **kwargs)

    @property
    def root_device(self) -> torch.device:
        """The device that ``samebits.init()`` chose."""
        return context.current("Trainer()").device

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The arguments with which Lightning splits the samples of other loaders; a spare's rank is corrected later."""
        return {"num_replicas": self.world_size, "rank": self.global_rank % self.world_size}

    def _configure_launcher(self) -> None:
        self._launcher = None  # the processes exist already

    def setup_distributed(self) -> None:
        """Set the ranks; the group exists already."""
        self.set_world_ranks()
        if not dist.is_initialized():  # ENABLE_RECOVERY=0
            dist.init_process_group()

    def set_world_ranks(self) -> None:
        """Adopt the ranks that the scheduler assigned."""
        take_place()

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait as Lightning does; before a generation, return at once."""
        if _has_generation():
            super().barrier(*args, **kwargs)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Broadcast as Lightning does; before a generation, return ``obj``."""
        return super().broadcast(obj, src) if _has_generation() else obj

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Reduce as Lightning does; before a generation, return ``tensor``."""
        return super().reduce(tensor, *args, **kwargs) if _has_generation() else tensor


class _Epochs(_FitLoop):
    """Lightning's loop over epochs, which can start in the middle of an epoch."""

    has_begun = False

    @property
    def restarted_mid_epoch(self) -> bool:
        return self.has_begun

    def on_advance_start(self) -> None:
        super().on_advance_start()
        if self.has_begun:  # Lightning has counted this start but called no hooks
            self.has_begun = False
            call._call_callback_hooks(self.trainer, "on_train_epoch_start")
            call._call_lightning_module_hook(self.trainer, "on_train_epoch_start")

    def on_run_end(self) -> None:
        self.epoch_loop.commit()
        super().on_run_end()


class _Batches(_TrainingEpochLoop):
    """Lightning's loop over an epoch's batches, which can start in the middle. It commits before each batch."""

    has_begun = False
    committed = 0  # in optimizer steps

    def reset(self) -> None:
        if not self.has_begun:
            super().reset()
        self.has_begun = False

    def on_run_start(self, data_fetcher: Any) -> None:
        fit = self.trainer.fit_loop
        for loader in self.trainer._training_loaders:
            loader.given = self.batch_progress.current.ready
        # The world size may have changed since the loaders were set up.
        loaders, limit = data_fetcher.combined_loader, self.trainer.limit_train_batches
        loaders.limits = [_parse_num_batches(RunningStage.TRAINING, len(one), limit) for one in loaders.flattened]
        fit.max_batches = sized_len(loaders)
        iter(data_fetcher)
        super().on_run_start(data_fetcher)

    def advance(self, data_fetcher: Any) -> None:
        self.commit()
        super().advance(data_fetcher)

    def _broadcast_sigterm_tensor(self) -> None:
        """Do nothing, because a worker that must leave notifies the scheduler itself."""

    def commit(self) -> None:
        """Commit the step together with everything that followed from it."""
        state, steps = self.trainer._elastic, self.global_step
        if state is not None and steps > self.committed:
            self.committed = steps
            state.commit()


class _EpochLoader:
    """The loader that Trainer sees, over an :class:`ElasticSampler`. Its length is that of a complete epoch."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.elastic_sampler, parts = elastic_parts(loader)
        self.given = 0  # batches of this epoch that earlier iterations returned
        self._loader: DataLoader[Any] = DataLoader(loader.dataset, **parts)

    def __len__(self) -> int:
        return self.given + batches_left(self._loader, self.elastic_sampler)

    def __iter__(self) -> Any:
        return batches_of(self._loader, self.elastic_sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class _Progress:
    """The progress of Trainer, its callbacks and the data module, in the form of a checkpoint without weights."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        return {
            "loops": trainer.fit_loop.state_dict(),
            "should_stop": trainer.should_stop,
            "callbacks": call._call_callbacks_state_dict(trainer),
            "precision": trainer.precision_plugin.state_dict(),
            "data": trainer.datamodule.state_dict() if trainer.datamodule is not None else {},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        trainer = self._trainer
        trainer.fit_loop.load_state_dict(state["loops"])
        for loop in (trainer.fit_loop, trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_loop.val_loop):
            loop.on_iteration_done()  # nothing is skipped, and no data is read again
        trainer.fit_loop.restarting = False
        trainer.should_stop = state["should_stop"]
        call._call_callbacks_load_state_dict(trainer, {"callbacks": state["callbacks"]})
        if state["precision"]:
            trainer.precision_plugin.load_state_dict(state["precision"])
        if trainer.datamodule is not None:
            trainer.datamodule.load_state_dict(state["data"])


def _has_generation() -> bool:
    return context.current("Trainer()").generation is not None


def _not_carried(what: str, fix: str) -> UsageError:
    return UsageError(f"samebits.integrations.lightning.Trainer: {what} is not supported. Fix: {fix}")
