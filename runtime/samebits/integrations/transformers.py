"""Transformers' ``Trainer``, whose training continues from the last commit after a loss.

After every loss, the Trainer's own epoch loop runs as if it had resumed from a checkpoint at the committed step, but
nothing is read and no batch is skipped: model, optimizer and sampler are already at that step. Loaders, places and
wrappers are those of the Accelerate integration.

This relies on private parts of Trainer: ``_inner_training_loop``, the four methods it consists of, and the use of
the module's ``skip_first_batches`` in ``_run_epoch`` to skip batches after a checkpoint.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from transformers import trainer as transformers_trainer
from transformers.trainer_utils import TrainOutput

from samebits.errors import UsageError
from samebits.integrations.accelerate import Accelerator, place_found
from samebits.training import elastic
from samebits.training.process import context
from samebits.training.state.checkpoint_config import CheckpointConfig
from samebits.training.state.handlers import StateHandler, register_handler
from samebits.training.state.torch_state import TorchState

__all__ = ["Trainer"]

_AT_THE_COMMIT = "the last commit"  # passed in place of a checkpoint's path
_PROGRESS = (
    *("global_step", "epoch", "total_flos", "num_input_tokens_seen", "log_history"),
    *("best_metric", "best_global_step", "best_model_checkpoint"),
)


class Trainer(transformers.Trainer):
    """Transformers' Trainer. ``train()`` is the training function, and every optimizer step ends with a commit.

    Create ``TrainingArguments`` after ``samebits.init()``. An evaluation or a log line that a loss interrupts is not
    repeated; the next logged loss is the average since then.

    Args:
        args, kwargs: as for Transformers.
        checkpoint: how often to save the state; Transformers' own checkpoints are not needed (``save_strategy="no"``).

    Raises:
        UsageError: ``samebits.init()`` was not called, or something unsupported was requested.
    """

    control: Any
    accelerator: Any

    def __init__(self, *args: Any, checkpoint: CheckpointConfig | None = None, **kwargs: Any) -> None:
        context.current("samebits.integrations.transformers.Trainer()")
        self._checkpoint = checkpoint
        self._elastic: TorchState | None = None
        super().__init__(*args, **kwargs)
        self.add_callback(_Commits(self))

    def create_accelerator_and_postprocess(self) -> None:
        """Create our Accelerator in the way in which Transformers creates its own."""
        with place_found():
            super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = Accelerator  # it has the same attributes
        self.accelerator.require_carried()

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: Any = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        self._require_carried(resume_from_checkpoint, trial)
        self.accelerator.free_memory()
        loader = self.get_train_dataloader()
        epochs, updates, _, samples, _, batches, max_steps = self.set_initial_training_values(args, loader)
        self._init_training_state(max_steps, updates, epochs, None, None)
        model, loader = self._prepare_for_training(max_steps, loader, None)
        model.zero_grad()
        self._initial_num_input_tokens_seen = self._initial_global_step = 0
        self._total_loss_scalar = 0.0
        self.control = self.callback_handler.on_train_begin(args, self.state, self.control)
        self._elastic = self.accelerator.elastic_state(
            scheduler=self.lr_scheduler, progress=_Progress(self), checkpoint=self._checkpoint
        )
        started_at = time.time()

        def train(_: TorchState) -> TrainOutput:
            self._begin_again()
            trained = self.state.global_step
            for epoch in range(trained // updates, epochs):
                if trained >= max_steps:
                    break
                self.control = self.callback_handler.on_epoch_begin(args, self.state, self.control)
                with _no_batch_skipped():
                    self._run_epoch(
                        model=model,
                        epoch=epoch,
                        train_dataloader=loader,
                        steps_in_epoch=batches,
                        num_update_steps_per_epoch=updates,
                        trial=None,
                        ignore_keys_for_eval=ignore_keys_for_eval,
                        start_time=started_at,
                        resume_from_checkpoint=_AT_THE_COMMIT,
                        epochs_trained=trained // updates,
                        steps_trained_in_current_epoch=trained % updates * args.gradient_accumulation_steps,
                    )
                if self.control.should_training_stop:
                    break
            return self._finalize_training(None, samples, started_at)

        result = elastic.run(train)(self._elastic)
        self.is_in_train = False
        return result or TrainOutput(self.state.global_step, 0.0, {})  # None if training had finished before

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Do nothing: the state restores random numbers."""

    def _begin_again(self) -> None:
        """Reset what Trainer stores outside its state to the value at the commit."""
        self._tr_loss = torch.tensor(0.0, device=self.args.device)
        self._globalstep_last_logged = self.state.global_step
        self.state.is_world_process_zero = self.is_world_process_zero()
        self.state.is_local_process_zero = self.is_local_process_zero()
        for flag in ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log"):
            setattr(self.control, flag, False)

    def _require_carried(self, resume_from_checkpoint: str | None, trial: Any) -> None:
        args = self.args
        for found, fix in (
            (resume_from_checkpoint and "train(resume_from_checkpoint=…)", "leave it out: a job resumes by itself"),
            (trial and "hyperparameter_search()", "search with one job for each trial"),
            (args.load_best_model_at_end and "load_best_model_at_end=True", "load the best model after train()"),
            (args.auto_find_batch_size and "auto_find_batch_size=True", "set per_device_train_batch_size"),
            (args.max_steps == 0 and "max_steps=0", "give a number of steps"),
        ):
            if found:
                raise UsageError(f"samebits.integrations.transformers.Trainer: {found} is not supported. Fix: {fix}")


class _Progress:
    """The parts of ``TrainerState`` that the next step, the log and the callbacks need."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self._trainer.state, name) for name in _PROGRESS}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self._trainer.state, name, value)


class _ProgressHandler(StateHandler):
    """Handler for Trainer's log and operation count, which change after the commit and are lost with a process."""

    records = ("log_history", "total_flos")


register_handler(_Progress, _ProgressHandler)


class _Commits(transformers.TrainerCallback):
    """Commits after every optimizer step, before anything is logged or evaluated."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        elastic_state = self._trainer._elastic
        if elastic_state is not None:
            elastic_state.commit()


@contextlib.contextmanager
def _no_batch_skipped() -> Iterator[None]:
    """Disable Trainer's batch skipping, because the sampler is already at the commit's position."""
    before = transformers_trainer.skip_first_batches
    transformers_trainer.skip_first_batches = lambda loader, _: loader
    try:
        yield
    finally:
        transformers_trainer.skip_first_batches = before
