"""Distinguish a lost peer from everything else that can go wrong in a training step.

A lost peer is recognised by what only the transport writes (its exception types, its source file in the message, the
frame that raised), never by a word such as "connection" alone. So a user's own RuntimeError is never mistaken for a
lost peer, and always ends the process with its text. CUDA errors do not count either: NCCL may report a peer's failure
as a CUDA error, so the device itself is tested afterwards (``device.require_sound``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePath

import torch.distributed as dist

from samebits.errors import CommunicationError, GenerationEndedError

__all__ = ["is_communication_failure"]

_TYPES = (CommunicationError, dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)

_GLOO = re.compile(
    # Thrown by gloo's transport, with its source line in front; "enforce fail" there is misuse, not a loss.
    r"\[\S*gloo/transport/\S+:\d+\] "
    r"(Connection closed|Connection reset|Read error|Read timeout|Write timeout|writev|Socket closed"
    r"|Socket unexpectedly closed|Timed out waiting|timed out connecting|Connect timeout|connect)"
    r"|Application timeout caused pair closure"
    r"|Gloo connectFullMesh failed with"
    # monitored_barrier, which names the missing ranks
    r"|(received errors? while waiting|failed to pass monitoredBarrier|timed out in monitoredBarrier)"
    # NCCL, from an aborted communicator
    r"|(NCCL|HCCL) communicator was aborted"
    # torch's second NCCL backend (nccl2), whose errors are plain RuntimeErrors
    r"|NCCL operation timed out|Watchdog caught collective operation timeout"
    r"|: (unhandled (cuda|system) error|internal error|remote process exited)[^\n]*\n\s*NCCL Last Error:"
    # torch_npu, from any operation that meets them; memory errors of this process's own device are not included
    r"|(?-i:FORCE STOP|SUSPECT REMOTE ERROR|HCCS LINK ERROR|UB LINK ERROR|HCCL OP RETRY FAILED)",
    re.IGNORECASE,
)
_FROM_CALLBACK = f"{GenerationEndedError.__name__}: "  # a Python error's text after passing through C++
_CALLBACK_PREFIX = "Got the following error when running the callback: "
_NETWORK_WORDS = re.compile(r"broken pipe|connection (re(set|fused)|closed|aborted)|timed out|socket", re.IGNORECASE)


def is_communication_failure(error: BaseException) -> bool:
    """Return whether ``error``, or a cause of it, shows that a member of the process group is gone.

    A user's own exception counts only if it was raised because of such a failure (``raise ... from``, or inside its
    ``except`` block).
    """
    return any(_says_so(cause) for cause in _chain(error))


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        waiting.append(one.__cause__)
        if not one.__suppress_context__:
            waiting.append(one.__context__)


def _says_so(error: BaseException) -> bool:
    if isinstance(error, _TYPES):
        return True
    if type(error) is not RuntimeError:
        return False
    text = str(error)
    if _GLOO.search(text):
        return True
    if text.startswith(_CALLBACK_PREFIX) and _FROM_CALLBACK in text:
        return True
    return _raised_in_torch_distributed(error) and _NETWORK_WORDS.search(text) is not None


def _raised_in_torch_distributed(error: BaseException) -> bool:
    frame = error.__traceback__
    if frame is None:
        return False
    while frame.tb_next is not None:
        frame = frame.tb_next
    folder = PurePath(dist.__file__).parent
    return folder in PurePath(frame.tb_frame.f_code.co_filename).parents
