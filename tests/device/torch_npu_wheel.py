"""``python -m tests.device.torch_npu_wheel WHEEL``: check that a torch_npu wheel has what SameBits uses.

The signatures and texts are those of ``SOURCE``. A wheel (``pip download --no-deps torch_npu``) is read as an archive,
never installed or run. Prints each difference; the status is 1 if there is one.
"""

from __future__ import annotations

import argparse
import ast
import sys
import zipfile
from pathlib import Path

SOURCE = "torch_npu-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl"

SIGNATURES: dict[str, dict[str, str]] = {
    "torch_npu/npu/_recovery.py": {
        "stop_device": "device_id",
        "restart_device": "device_id: int, rebuild_all_resources: bool=False, disable_tensor_unsafe_check: bool=False",
    },
    "torch_npu/npu/npu_config.py": {"set_compile_mode": "jit_compile=False"},
    "torch_npu/distributed/distributed_c10d.py": {"reinit_process_group": "group=None, rebuild_link=True"},
}
"""By file and function, the arguments as ``ast.unparse`` writes them."""

CALLS = {"torch_npu/distributed/distributed_c10d.py": "abort_hccl_comm('reinit')"}
"""How torch_npu itself calls compiled functions, which have no signature to read."""

LIBRARY = "torch_npu/lib/libtorch_npu.so"
TEXTS = (
    *("UCE ERROR", "HBM MULTI BIT ECC ERROR", "SUSPECT MEM ERROR", "NPU out of memory", "FORCE STOP"),
    *("SUSPECT REMOTE ERROR", "HCCS LINK ERROR", "UB LINK ERROR", "HCCL OP RETRY FAILED"),
    *("TORCH_HCCL_ASYNC_ERROR_HANDLING", "HCCL_ASYNC_ERROR_HANDLING", "abort_hccl_comm"),
)
"""Texts of the library, and the names it reads."""


def differences(wheel: Path) -> list[str]:
    """Return this wheel's differences."""
    found = []
    with zipfile.ZipFile(wheel) as archive:
        for name in {*SIGNATURES, *CALLS}:
            tree = ast.parse(archive.read(name))
            nodes = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
            has = {node.name: ast.unparse(node.args) for node in nodes}
            for function, wanted in SIGNATURES.get(name, {}).items():
                if has.get(function) != wanted:
                    found.append(f"{name}: {function}({has.get(function)}), expected ({wanted})")
            if name in CALLS and CALLS[name] not in ast.unparse(tree):
                found.append(f"{name}: nobody calls {CALLS[name]}")
        library = archive.read(LIBRARY)
        found += [f"{LIBRARY}: no {text!r}" for text in TEXTS if text.encode() not in library]
    return found


def main() -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.device.torch_npu_wheel", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("wheel", type=Path, metavar="WHEEL")
    found = differences(parser.parse_args().wheel)
    print("\n".join(found) or "as recorded")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
