"""A simulated device other than the CPU, with its own collectives, for machines without accelerators. See
``device.cpp``.

It is compiled once for each version of torch; ``register`` makes it torch's accelerator under the name ``trial``. A
script needs no change: with :func:`autoload_folder` in PYTHONPATH, ``import torch`` loads it as it loads every
installed device backend. TRIAL_DEVICES and TRIAL_DEVICE_BYTES set the number of such devices and the memory of each;
TRIAL_STOPS=1 makes it end its collectives as Ascend's does; TRIAL_LAG_US lets it fall behind the host; TRIAL_SHARED=0
makes its collectives refuse two ranks on one device, as NCCL before 2.30 does, and TRIAL_SHARED=asked as NCCL since
then does, unless NCCL_MULTI_RANK_GPU_ENABLE=1. gloo accepts its tensors as it accepts CUDA's: a
collective runs on copies in host memory, and a send or receive uses the tensor's own address.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import filelock

NAME = "trial"
COLLECTIVES = "trialccl"
_ON_GLOO = ("_allgather_base", "allgather", "allreduce", "broadcast", "gather", "reduce", "scatter")
_HERE = Path(__file__).resolve().parent
_ROOT = _HERE.parents[2]


def build(verbose: bool = False) -> ModuleType:
    """Build the compiled part: half a minute the first time, and after a change of its source or torch."""
    import torch
    from torch.utils import cpp_extension

    name = "samebits_trial_" + "".join(one if one.isalnum() else "_" for one in torch.__version__)
    folder = Path(os.environ.get("TRIAL_BUILD", _ROOT / "build" / "trial-device")) / name
    folder.mkdir(parents=True, exist_ok=True)
    library, sources = folder / f"{name}.so", [_HERE / "device.cpp", _HERE / "collectives.cpp"]
    built_from, stamp = _digest(), folder / "built-from"
    with filelock.FileLock(folder / "one-at-a-time"):
        if not library.exists() or not stamp.exists() or stamp.read_text() != built_from:
            (folder / "lock").unlink(missing_ok=True)  # of a killed build, which torch would wait for forever
            cpp_extension.load(
                name=name,
                sources=[str(one) for one in sources],
                extra_cflags=["-O1"],
                build_directory=str(folder),
                is_python_module=False,
                verbose=verbose,
            )
            stamp.write_text(built_from)
    spec = importlib.util.spec_from_file_location(name, library)
    assert spec is not None and spec.loader is not None
    built = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(built)
    return built


def _digest() -> str:
    sources = sorted(path for path in _HERE.iterdir() if path.suffix in (".cpp", ".h"))
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in sources)).hexdigest()


def autoload_folder(parent: Path) -> Path:
    """Return a folder below ``parent`` for PYTHONPATH, with which torch loads the device by itself."""
    folder = parent / "autoload"
    metadata = folder / "samebits_trial-1.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: samebits-trial\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(f"[torch.backends]\n{NAME} = samebits_trial:register\n")
    (folder / "samebits_trial.py").write_text(
        f"import sys\n\n\ndef register():\n    sys.path.append({str(_ROOT)!r})\n"
        "    from tests.device.backend import register\n    register()\n"
    )
    return folder


def register() -> None:
    """Register it as torch's accelerator, once per process."""
    import torch
    import torch.distributed as dist

    if hasattr(torch, NAME):
        return
    built = build()
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module(built))
    torch.utils.generate_methods_for_privateuse1_backend()

    def collectives(store: Any, rank: int, size: int, timeout: Any) -> Any:
        return built.Collectives(store, rank, size)

    dist.Backend.register_backend(COLLECTIVES, collectives, devices=[NAME])
    dist.Backend.backend_capability[dist.Backend.GLOO].append(NAME)
    if os.environ.get("COLLECTIVE_BACKEND") == dist.Backend.GLOO:  # else a launch would have one more Python frame
        _let_gloo_accept_its_tensors(built)


def _let_gloo_accept_its_tensors(built: Any) -> None:
    """Imitate ``ProcessGroupGlooCuda.cpp``, which copies each tensor to the host and the result back."""
    import torch
    import torch.distributed as dist

    def staging(launch: Callable[..., Any]) -> Callable[..., Any]:
        def staged(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not _is_gloos(self):
                return launch(self, *args, **kwargs)
            pairs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

            def copied(value: Any) -> Any:
                if isinstance(value, list):
                    return [copied(one) for one in value]
                if not isinstance(value, torch.Tensor) or value.device.type != NAME:
                    return value
                return pairs.setdefault(id(value), (value, value.detach().cpu()))[1]

            given = [copied(one) for one in args]
            if not pairs:
                return launch(self, *args, **kwargs)
            tensors, copies = (list(side) for side in zip(*pairs.values(), strict=True))
            results = args[0] if isinstance(args[0], list) else [args[0]]
            outputs = [one for part in results for one in (part if isinstance(part, list) else [part])]
            return built.staged(launch(self, *given, **kwargs), tensors, copies, outputs)

        return staged

    def _is_gloos(group: Any) -> bool:
        if isinstance(group, dist.ProcessGroupGloo):
            return True
        try:
            return isinstance(group._get_backend(torch.device(NAME)), dist.ProcessGroupGloo)
        except RuntimeError:  # the group has no backend for this device
            return False

    kinds: tuple[Any, ...] = (dist.ProcessGroup, dist.ProcessGroupGloo)
    for kind in kinds:
        for name in _ON_GLOO:
            setattr(kind, name, staging(getattr(kind, name)))


def _module(built: Any) -> ModuleType:
    """The functions that torch expects in ``torch.trial``."""
    import torch

    module: Any = ModuleType(f"torch.{NAME}")

    def index_of(device: Any = None) -> int:
        if device is None:
            return int(built.current_device())
        return device if isinstance(device, int) else torch.device(device).index or 0

    def generator(device: Any = None) -> torch.Generator:
        found: torch.Generator = built.default_generator(index_of(device))
        return found

    def seed_all(seed: int) -> None:
        for index in range(built.device_count()):
            generator(index).manual_seed(seed)

    module.is_available = lambda: built.device_count() > 0
    module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count = built.device_count
    module.current_device = built.current_device
    module.set_device = lambda device: built.set_device(index_of(device))
    module.get_device_name = lambda device=None: "a simulated device for tests"
    module.synchronize = lambda device=None: built.synchronize(index_of(device))
    module.manual_seed = lambda seed: generator().manual_seed(seed)
    module.manual_seed_all = seed_all
    module.get_rng_state = lambda device=None: generator(device).get_state()
    module.set_rng_state = lambda state, device=None: generator(device).set_state(state)
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    module.memory_allocated = lambda device=None: built.memory_allocated()
    module.memory_reserved = module.memory_allocated
    module.mem_get_info = lambda device=None: (
        built.total_memory() - built.memory_allocated() - built.held_by_others(),
        built.total_memory(),
    )
    module.max_memory_allocated = lambda device=None: built.max_memory_allocated()
    module.total_memory = built.total_memory
    module.lose_context = built.lose_context
    module.hold_collectives = built.hold_collectives
    module.waits = built.waits
    module.streams = built.streams
    module.sleep = built.sleep
    module.is_current_stream_capturing = lambda: module.captures
    module.captures = False  # there are no graphs; a test says that one is being captured
    for name in ("stop_device", "restart_device"):
        if hasattr(built, name):
            setattr(module, name, getattr(built, name))
    made: ModuleType = module
    return made
