"""Ray Train's API: ``from samebits.ray import Trainer`` replaces ``from ray.train.torch import TorchTrainer``.

``fit()`` runs the job as ``samebits run --on ray`` does. The training function is named, not sent: each worker imports
the module, or the script, that defines the function, and reads ``train_loop_config`` as JSON from the run's folder.
Therefore no worker unpickles data from the network or from a disk. Ray pickles only SameBits' own actor, for its own
object store. The function must be at the top level of a module or script that all hosts can read at the same path.

torch is imported by workers only, and Ray by ``fit()`` only.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samebits import config, strict_json
from samebits.errors import JobFailedError, UsageError
from samebits.store import durable

__all__ = [
    "Checkpoint",
    "Result",
    "RunConfig",
    "ScalingConfig",
    "TrainContext",
    "Trainer",
    "get_checkpoint",
    "get_context",
    "prepare_data_loader",
    "prepare_model",
    "report",
]

REPORT = "report.json"


@dataclass(frozen=True, slots=True)
class ScalingConfig:
    """The number of workers, and the resources that each worker uses.

    Args:
        num_workers: number of workers, at least 1.
        use_gpu: give each worker a GPU; otherwise each worker gets a CPU.
        num_hosts: number of hosts, among which the workers are divided equally; None: as few as the cluster allows.
        num_spares: warm spares, which take over the ranks of lost workers. Without a spare, the host restarts a lost
            worker.

    Raises:
        UsageError: the numbers are inconsistent.

    Example::

        from samebits.ray import ScalingConfig

        scaling = ScalingConfig(num_workers=8, num_hosts=2, num_spares=1)
    """

    num_workers: int = 1
    use_gpu: bool = False
    num_hosts: int | None = None
    num_spares: int = 0

    def __post_init__(self) -> None:
        """Check the numbers."""
        if self.num_workers < 1 or self.num_spares < 0:
            raise UsageError(
                f"ScalingConfig(num_workers={self.num_workers}, num_spares={self.num_spares}): expected at least 1 "
                "worker and 0 spares. Fix: raise the number"
            )
        if self.num_hosts is not None and (self.num_hosts < 1 or self.num_workers % self.num_hosts):
            raise UsageError(
                f"ScalingConfig(num_workers={self.num_workers}, num_hosts={self.num_hosts}): each host runs the same "
                f"number of workers. Fix: choose a num_hosts that divides {self.num_workers}"
            )

    def hosts(self, free: list[int]) -> int:
        """Return the number of hosts to request.

        Args:
            free: for each node of the cluster, the number of workers that it can hold.
        """
        if self.num_hosts is not None:
            return self.num_hosts
        for hosts in range(1, self.num_workers + 1):
            each, rest = divmod(self.num_workers, hosts)
            if not rest and sum(room >= each for room in free) >= hosts:
                return hosts
        return self.num_workers


@dataclass(frozen=True, slots=True)
class RunConfig:
    """The name of a run and the folder for its results.

    Args:
        name: the run's folder in ``storage_path``. If the same script is run again under this name, it follows a run
                    that is under way, and resumes one that was interrupted. None: a name with the current time.
        storage_path: a folder that all hosts share; None: ``~/ray_results``.

    Example::

        from samebits.ray import RunConfig

        run = RunConfig(name="digits", storage_path="/shared/runs")
    """

    name: str | None = None
    storage_path: str | os.PathLike[str] | None = None

    def folder(self) -> Path:
        """Return the run's folder.

        Raises:
            UsageError: the name is not a folder's name.
        """
        name = time.strftime("train_%Y-%m-%d_%H-%M-%S") if self.name is None else self.name
        if not name.isprintable() or name in ("", ".", "..") or "/" in name:
            raise UsageError(f"RunConfig(name={name!r}): expected the name of one folder. Fix: leave out '/'")
        storage = "~/ray_results" if self.storage_path is None else self.storage_path
        return Path(storage).expanduser().absolute() / name


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder with the files of a checkpoint.

    Args:
        path: the folder.

    Example::

        from samebits.ray import Checkpoint

        checkpoint = Checkpoint.from_directory("/tmp/model")
        with checkpoint.as_directory() as folder:
            print(folder)
    """

    path: str
    _loaded: Callable[[], None] = field(default=lambda: None, repr=False, compare=False)

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """Return the checkpoint in a folder."""
        return cls(os.fspath(path))

    def to_directory(self, path: str | os.PathLike[str]) -> str:
        """Copy the files to a folder, and return the folder."""
        shutil.copytree(self.path, path, dirs_exist_ok=True)
        self._loaded()
        return os.fspath(path)

    @contextlib.contextmanager
    def as_directory(self) -> Iterator[str]:
        """Context manager that returns the folder. The files must not be changed."""
        yield self.path
        self._loaded()


@dataclass(frozen=True, slots=True)
class Result:
    """The result of ``Trainer.fit``.

    Attributes:
        metrics: rank 0's newest reported metrics; None if nothing was reported.
        checkpoint: the newest reported checkpoint; None if none was reported.
        path: the run's folder.
        error: always None, since ``fit()`` raises the error of a failed run. Kept for scripts that read the attribute.

    Example::

        from samebits.ray import Result

        result = Result.from_path("/shared/runs/digits")
        print(result.metrics)
    """

    metrics: dict[str, Any] | None
    checkpoint: Checkpoint | None
    path: str
    error: Exception | None = None

    @classmethod
    def from_path(cls, path: str | os.PathLike[str]) -> Result:
        """Return the newest report in a run's folder.

        Raises:
            UsageError: the file with the report was changed.
        """
        folder, reported = Path(path), Path(path, REPORT)
        try:
            told = strict_json.loads(reported.read_bytes())
            metrics, name = dict(told["metrics"]), str(told["checkpoint"])
        except FileNotFoundError:
            return cls(None, None, str(folder))
        except (ValueError, TypeError, KeyError) as error:
            raise UsageError(f"{reported}: it is not a report ({error}). Fix: remove the file") from None
        return cls(metrics, Checkpoint(str(folder / name)) if name else None, str(folder))


class Trainer:
    """Train a function on the hosts of a Ray cluster, in the shape of Ray Train's ``TorchTrainer``.

    If a worker is lost, a spare or a new process takes over its rank, and every rank calls the function again from its
    beginning. Surviving workers keep their processes. ``get_checkpoint()`` then returns the newest checkpoint that all
    ranks reported, so the function repeats the steps after that report. To repeat no step, train with
    ``samebits.elastic.TorchState`` and ``samebits run --on ray`` instead.

    The result has the bits of an undisturbed run if the function is deterministic and its checkpoint contains
    everything it needs except random numbers. The generators of torch, NumPy and Python continue as they were at the
    report, once the function has read the checkpoint.

    Args:
        train_fn: a function at the top level of a module, or of the script that calls :meth:`fit`. The script must call
            ``fit`` under ``if __name__ == "__main__":``, since each worker imports the script. The function has one
            argument, the configuration, or none.
        train_loop_config: the configuration, a dictionary that JSON can hold.
        scaling_config: a :class:`ScalingConfig`.
        run_config: a :class:`RunConfig`.

    Raises:
        UsageError: the function cannot be imported by its name, or the configuration cannot be written as JSON.

    Example::

        from samebits.ray import RunConfig, ScalingConfig, Trainer, report

        def train(config):
            report({"rate": config["lr"]})

        if __name__ == "__main__":
            trainer = Trainer(
                train,
                train_loop_config={"lr": 0.01},
                scaling_config=ScalingConfig(num_workers=2),
                run_config=RunConfig(name="digits", storage_path="/shared/runs"),
            )
    """

    def __init__(
        self,
        train_fn: Callable[..., object],
        *,
        train_loop_config: Mapping[str, Any] | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
    ) -> None:
        self._plan = plan_of(train_fn, train_loop_config or {})
        self._scaling = scaling_config or ScalingConfig()
        self._run = run_config or RunConfig()

    def fit(self) -> Result:
        """Start the run on the cluster that RAY_ADDRESS or this machine's Ray names, and follow it to its end.

        If the same run is under way, follow it. Ctrl-C ends the run.

        Raises:
            JobFailedError: the run ended unfinished.
            UsageError: Ray is not installed, no cluster answers, or another run has this name.
        """
        from samebits.hosts import ray_cluster

        if config.whole_environment().get("ROLE") == "worker":
            raise UsageError(
                "Trainer.fit() was called while a worker imported the script. Fix: call it under "
                '`if __name__ == "__main__":`'
            )
        ray = ray_cluster.connected()
        folder, scaling = self._run.folder(), self._scaling
        kind = "GPU" if scaling.use_gpu else "CPU"
        hosts = scaling.hosts([int(node["Resources"].get(kind, 0)) for node in ray.nodes() if node["Alive"]])
        per_host = scaling.num_workers // hosts
        plan = write_plan(self._plan, folder)
        words = ["--nnodes", str(hosts), "-n", str(per_host), "--spares", str(scaling.num_spares)]
        words += ["--rdzv-id", folder.name, "-m", "samebits.ray", str(plan)]
        status = ray_cluster.run(words, hosts, per_host, folder=folder, kind=kind)
        if status != 0:
            raise JobFailedError(
                f"the run in {folder} ended with exit code {status}. Fix: `samebits history` in that folder shows the "
                "first cause; fit() with the same name resumes an interrupted run"
            )
        return Result.from_path(folder)


def plan_of(function: Callable[..., object], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data that a worker needs to call the function: its name, its configuration and the import path.

    Raises:
        UsageError: as :class:`Trainer`.
    """
    module, name = name_of(function)
    given = require_json("train_loop_config", config)
    return {
        "module": module,
        "function": name,
        "config": given,
        "path": [str(Path(one).absolute()) for one in sys.path],
    }


def write_plan(plan: Mapping[str, Any], folder: Path) -> Path:
    """Write a plan for the workers of the run in this folder, and return the file, which is named by its hash."""
    content = strict_json.dumps(plan).encode()
    path = folder / "device" / f"train-{hashlib.sha256(content).hexdigest()[:16]}.json"
    durable.make_directory(path.parent)
    durable.replace_note(path, content)
    return path


def name_of(function: Callable[..., object]) -> tuple[str, str]:
    """Return the module (or the script's path) and the qualified name by which a worker imports a function.

    Raises:
        UsageError: the function cannot be imported by name.
    """
    name, module = getattr(function, "__qualname__", ""), getattr(function, "__module__", "")
    main: Any = sys.modules["__main__"]
    place = module
    if module == "__main__":
        spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
        place = spec.name if spec is not None else str(Path(file).absolute()) if file else ""
    if place and _found(sys.modules.get(module), name) is function:
        return place, name
    raise UsageError(
        f"Trainer({name or type(function).__name__}): each worker imports the training function by its name, and "
        f"{name or 'this object'} is not at the top level of a module or script. Fix: define it there with `def`, "
        "and pass the outside values that it uses in train_loop_config"
    )


def _found(module: object, name: str) -> object:
    return functools.reduce(lambda inside, part: getattr(inside, part, None), name.split("."), module)


def require_json(what: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given values by name if JSON keeps them unchanged.

    Raises:
        UsageError: names the first entry that JSON cannot hold.
    """
    for key, value in given.items():
        try:
            is_kept = isinstance(key, str) and strict_json.loads(strict_json.dumps(value)) == value
        except (TypeError, ValueError):
            is_kept = False
        if not is_kept:
            raise UsageError(
                f"{what}[{key!r}]: JSON cannot hold this {type(value).__name__} unchanged. Fix: pass strings, finite "
                "numbers, booleans, None, and lists and dictionaries of them"
            )
    return dict(given)


# --- inside the training function -------------------------------------------------------------------------------------


def report(metrics: Mapping[str, Any], checkpoint: Checkpoint | None = None) -> None:
    """Report metrics, and optionally a checkpoint, from every rank.

    All ranks must call this together. After a loss, training resumes at the last report. Rank 0's metrics are kept. The
    checkpoint's files are copied to the run's folder, where those of all ranks are merged, and are durable when this
    returns.

    Args:
        metrics: values that JSON can hold. Numbers also appear in the progress line and on the page.
        checkpoint: the checkpoint; its folder can be removed afterwards.

    Raises:
        UsageError: called outside a training function, or the metrics cannot be written as JSON.

    Example::

        from samebits import ray

        def train(config):
            ray.report({"loss": 0.5})
    """
    from samebits.integrations import ray_train

    ray_train.report(require_json("metrics", metrics), None if checkpoint is None else Path(checkpoint.path))


def get_checkpoint() -> Checkpoint | None:
    """Return the newest checkpoint that all ranks reported, or None if there is none.

    Raises:
        UsageError: called outside a training function.

    Example::

        from samebits import ray

        def train(config):
            checkpoint = ray.get_checkpoint()
            if checkpoint is not None:
                with checkpoint.as_directory() as folder:
                    print(folder)
    """
    from samebits.integrations import ray_train

    session = ray_train.current("samebits.ray.get_checkpoint()")
    folder = session.checkpoint()
    return None if folder is None else Checkpoint(str(folder), session.continue_generators)


@dataclass(frozen=True, slots=True)
class TrainContext:
    """This worker's ranks and world sizes; see :func:`get_context`."""

    world_rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    experiment_name: str

    def get_world_rank(self) -> int:
        """Return this worker's rank among all workers."""
        return self.world_rank

    def get_world_size(self) -> int:
        """Return the number of workers."""
        return self.world_size

    def get_local_rank(self) -> int:
        """Return this worker's rank among the workers of its host."""
        return self.local_rank

    def get_local_world_size(self) -> int:
        """Return the number of workers of this host."""
        return self.local_world_size

    def get_experiment_name(self) -> str:
        """Return the run's name."""
        return self.experiment_name


def get_context() -> TrainContext:
    """Return this worker's ranks and world sizes.

    Raises:
        UsageError: called outside a training function.

    Example::

        from samebits import ray

        def train(config):
            if ray.get_context().get_world_rank() == 0:
                print("one line for all ranks")
    """
    from samebits.integrations import ray_train

    session = ray_train.current("samebits.ray.get_context()")
    place = session.place()
    return TrainContext(place.rank, place.world_size, place.local_rank, place.local_world_size, session.folder.name)


def prepare_model(model: Any, *, parallel_strategy_kwargs: Mapping[str, Any] | None = None) -> Any:
    """Move a model to this worker's device, and wrap it in DistributedDataParallel if there are several workers.

    Args:
        model: a ``torch.nn.Module``.
        parallel_strategy_kwargs: arguments of DistributedDataParallel.

    Raises:
        UsageError: called outside a training function.

    Example::

        import torch
        from samebits import ray

        def train(config):
            model = ray.prepare_model(torch.nn.Linear(4, 1))
    """
    from samebits.integrations import ray_train

    return ray_train.prepare_model(model, dict(parallel_strategy_kwargs or {}))


def prepare_data_loader(data_loader: Any) -> Any:
    """Divide a loader's samples among the workers with a ``DistributedSampler`` that shuffles if the loader does.

    On an accelerator, the loader also moves each batch to the device. Call ``loader.sampler.set_epoch(epoch)`` before
    each epoch, as with Ray Train.

    Args:
        data_loader: a ``torch.utils.data.DataLoader`` with a batch size and with torch's sequential or random order.

    Raises:
        UsageError: called outside a training function, or the loader has a custom sampler or no batch size.

    Example::

        import torch
        from samebits import ray

        def train(config):
            loader = ray.prepare_data_loader(torch.utils.data.DataLoader(range(64), batch_size=8, shuffle=True))
    """
    from samebits.integrations import ray_train

    return ray_train.prepare_data_loader(data_loader)


def main() -> None:
    """Run a worker: ``python -m samebits.ray PLAN``, which ``Trainer.fit`` starts on every host."""
    from samebits.integrations import ray_train

    plan = Path(sys.argv[1])
    told = strict_json.loads(plan.read_bytes())
    ray_train.run(told, plan.parent.parent, REPORT)


if __name__ == "__main__":
    main()
