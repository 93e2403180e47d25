"""Everything about a process that changes the bits of its results, as text that two processes can compare.

Here lives one description. Never here: comparing, refusing, setting. The one idea: the same step gives other bits on
another number of threads, another instruction set, another kind of accelerator or with another precision switch,
without any error; so each of these is named with its value, and processes that agree in all of them compute the same.
"""

from __future__ import annotations

import platform
from typing import Any

import torch

__all__ = ["describe"]


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
