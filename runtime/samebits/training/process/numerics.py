"""Describe everything about a process that affects the bits of its results, as text that processes can compare.

A different number of threads, instruction set, type of accelerator or precision setting changes the bits of the same
step without an error. Each of these is therefore listed with its value, and ``core.rounds.rendezvous`` compares the
lists. This module only sets the number of threads, if the user has not chosen one.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

from samebits import config
from samebits.service import log

_TOPOLOGY = Path("/sys/devices/system/cpu")


def settle_threads(workers: int, *, at_any_size: bool = False) -> bool:
    """Use one thread if the job has several workers and the user has set no number; return whether it was set.

    Otherwise, each worker of a host would use all of its cores, and eight workers on two cores would train about twenty
    times slower. ``samebits run`` and torchrun set one thread as well. Dividing the cores among workers would be faster
    on a large host, but a replacement on another host, or beside fewer workers, would get a different number and
    compute different bits. A number that the script has set before this call is not changed.

    Args:
        workers: the number of workers with which the job starts.
        at_any_size: whether the bits must be those of a job with several workers even if this job has only one.
    """
    cores = os.sched_getaffinity(0)
    if (
        (workers < 2 and not at_any_size)
        or torch.get_num_threads() not in {len(cores), _physical(cores)}
        or not config.default_to_one_thread()
    ):
        return False
    torch.set_num_threads(1)
    each = f"each of {workers} workers" if workers > 1 else "each worker"
    log.say(
        f"one thread for {each}, as OMP_NUM_THREADS is not set; this process may use {len(cores)} "
        "cores. To use more of them, export OMP_NUM_THREADS with the same number for every worker and every restart"
    )
    return True


def _physical(cores: set[int]) -> int:
    """Return the number of physical cores among these, which is MKL's default number of threads."""
    lists = (_TOPOLOGY / f"cpu{core}" / "topology" / "thread_siblings_list" for core in cores)
    return len({path.read_text() for path in lists if path.exists()}) or len(cores)


def describe(device: torch.device) -> tuple[tuple[str, str], ...]:
    """Return names and values, in a fixed order, of everything that affects the bits computed on ``device``.

    Call it after the script has set its threads and flags. The number of inter-op threads is left out, because it only
    limits how many operations run concurrently.
    """
    mkldnn: Any = torch.backends.mkldnn  # creates its attributes dynamically
    common = (
        ("torch", str(torch.__version__)),  # a subclass of str, which the schema rejects
        ("machine", platform.machine()),
        ("device", device.type),
        ("threads", str(torch.get_num_threads())),
        ("CPU capability", torch.backends.cpu.get_cpu_capability()),
        ("denormals flushed to zero", _flushes_denormals()),
        ("default dtype", str(torch.get_default_dtype())),
        ("deterministic algorithms", str(torch.are_deterministic_algorithms_enabled())),
        ("mkldnn.enabled", str(mkldnn.enabled)),
        ("mkldnn.deterministic", str(mkldnn.deterministic)),
        # The older switches (allow_tf32, set_float32_matmul_precision) set these too but cannot always be read.
        ("mkldnn.matmul.fp32_precision", str(mkldnn.matmul.fp32_precision)),
        ("mkldnn.conv.fp32_precision", str(mkldnn.conv.fp32_precision)),
        ("mkldnn.rnn.fp32_precision", str(mkldnn.rnn.fp32_precision)),
    )
    if device.type == "cpu":
        return common
    name = ("device name", str(torch.get_device_module(device.type).get_device_name(device)))
    return (*common, name, *(_cuda(device) if device.type == "cuda" else ()))


def _flushes_denormals() -> str:
    """Return whether this thread rounds denormal numbers to zero. torch can set this but not report it."""
    half = torch.full((1,), torch.finfo(torch.float32).tiny) / 2
    return str(half.item() == 0.0)


def _cuda(device: torch.device) -> tuple[tuple[str, str], ...]:
    matmul: Any = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    return (
        ("device capability", ".".join(map(str, torch.cuda.get_device_capability(device)))),
        ("CUDA", str(torch.version.cuda or torch.version.hip)),
        ("cuDNN", str(cudnn.version())),
        ("cudnn.enabled", str(cudnn.enabled)),
        ("cudnn.deterministic", str(cudnn.deterministic)),
        ("cudnn.benchmark", str(cudnn.benchmark)),
        ("cudnn.conv.fp32_precision", str(cudnn.conv.fp32_precision)),
        ("cudnn.rnn.fp32_precision", str(cudnn.rnn.fp32_precision)),
        ("cuda.matmul.fp32_precision", str(matmul.fp32_precision)),
        ("cuda.matmul.fp16 reduced precision", str(matmul.allow_fp16_reduced_precision_reduction)),
        ("cuda.matmul.bf16 reduced precision", str(matmul.allow_bf16_reduced_precision_reduction)),
    )
