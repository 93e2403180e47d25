"""Everything about a process that changes the bits of its results, as text that two processes can compare.

Comparing and refusing belong to ``core.rounds.rendezvous``. The same step gives other bits with another number of
threads, instruction set, kind of accelerator or precision switch, and raises no error. So each of these is listed with
its value. The only one set here is the number of threads, if the user has left it open.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

from samebits import config
from samebits.service import log

__all__ = ["describe", "settle_threads"]

_TOPOLOGY = Path("/sys/devices/system/cpu")


def settle_threads(workers: int) -> bool:
    """Compute with one thread if the job has several workers and the user has set no number; whether it was done.

    Without this each worker of a host takes all of its cores, and eight workers on two cores train some twenty times
    slower. One is what ``samebits run`` and torchrun set. A share of the cores would be faster on a large host, but a
    replacement on another host, or beside fewer workers, would derive another number and thereby compute other bits.
    A number that the script has set before this call is kept.
    """
    cores = os.sched_getaffinity(0)
    if (
        workers < 2
        or torch.get_num_threads() not in {len(cores), _physical(cores)}
        or not config.default_to_one_thread()
    ):
        return False
    torch.set_num_threads(1)
    log.say(
        f"one thread for each of {workers} workers, as OMP_NUM_THREADS is not set; this process may use {len(cores)} "
        "cores. To use more of them, export OMP_NUM_THREADS with the same number for every worker and every restart"
    )
    return True


def _physical(cores: set[int]) -> int:
    """How many of these are cores of their own rather than hyperthreads: the number that MKL takes by itself."""
    lists = (_TOPOLOGY / f"cpu{core}" / "topology" / "thread_siblings_list" for core in cores)
    return len({path.read_text() for path in lists if path.exists()}) or len(cores)


def describe(device: torch.device) -> tuple[tuple[str, str], ...]:
    """Names and values, in a fixed order, of what decides the bits that ``device`` computes.

    Values are read when this is called: after the script has set its threads and flags. The number of inter-op threads
    is left out, since it only says how many operations run beside each other.
    """
    mkldnn: Any = torch.backends.mkldnn  # it makes attributes that no type checker sees
    common = (
        ("torch", str(torch.__version__)),  # torch's own is a kind of text that no schema knows
        ("machine", platform.machine()),
        ("device", device.type),
        ("threads", str(torch.get_num_threads())),
        ("CPU capability", torch.backends.cpu.get_cpu_capability()),
        ("denormals flushed to zero", _flushes_denormals()),
        ("default dtype", str(torch.get_default_dtype())),
        ("deterministic algorithms", str(torch.are_deterministic_algorithms_enabled())),
        ("mkldnn.enabled", str(mkldnn.enabled)),
        ("mkldnn.deterministic", str(mkldnn.deterministic)),
        # The older switches (allow_tf32, set_float32_matmul_precision) set these too, but cannot always be read back.
        ("mkldnn.matmul.fp32_precision", str(mkldnn.matmul.fp32_precision)),
        ("mkldnn.conv.fp32_precision", str(mkldnn.conv.fp32_precision)),
        ("mkldnn.rnn.fp32_precision", str(mkldnn.rnn.fp32_precision)),
    )
    if device.type == "cpu":
        return common
    name = ("device name", str(torch.get_device_module(device.type).get_device_name(device)))
    return (*common, name, *(_cuda(device) if device.type == "cuda" else ()))


def _flushes_denormals() -> str:
    """Whether this thread rounds denormal numbers to zero: torch can set it but not tell."""
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
