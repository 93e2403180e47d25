"""Calls of NCCL and torch_npu have valid arguments, according to torch's stubs and a recorded wheel.

No device runs, so this does not show that the calls work, but it finds calls that could not even be made.
"""

from __future__ import annotations

import ast
import inspect
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import _ProcessGroupWrapper
from torch.distributed import distributed_c10d

from samebits import config
from samebits.core.causes.table import DEFAULT, CauseClass, Observation
from samebits.training import torch_private
from samebits.training.group import device
from samebits.training.process.compiled_code import keep_compiled_code
from tests.device import torch_npu_wheel
from tests.device.torch_npu_wheel import CALLS, LIBRARY, SIGNATURES, TEXTS, differences

STUBS = Path(torch.__file__).parent / "_C" / "_distributed_c10d.pyi"
NPU = SimpleNamespace(type="npu", index=3)


def recorded(function: str, calls: list[inspect.BoundArguments]) -> Callable[..., None]:
    """Return a torch_npu function that records calls and refuses those that the real one would refuse."""
    arguments = next(names[function] for names in SIGNATURES.values() if function in names)
    scope: dict[str, Any] = {}
    exec(f"def {function}({arguments}): ...", scope)
    signature = inspect.signature(scope[function])

    def call(*args: Any, **kwargs: Any) -> None:
        calls.append(signature.bind(*args, **kwargs))

    return call


def test_torch_npu_accepts_our_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[inspect.BoundArguments] = []
    names = ("stop_device", "restart_device", "set_compile_mode")
    module = SimpleNamespace(**{name: recorded(name, calls) for name in names})
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    npu: Any = NPU
    assert device.stop(npu)
    device.restart(npu)
    settings, _ = config.read({"ROLE": "worker", "WORKER_NUM": "1", "OP_COMPILE": "cache"})
    keep_compiled_code(settings, npu, prunes=False)
    assert [call.arguments for call in calls] == [{"device_id": 3}, {"device_id": 3}, {"jit_compile": True}]


def test_hccl_communicator_is_aborted_by_torch_npus_own_call() -> None:
    asked: list[str] = []
    backend = SimpleNamespace(abort_hccl_comm=asked.append)
    group: Any = SimpleNamespace(_get_backend=lambda _: backend)
    torch_private.abort_group(group, torch.device("cpu"))
    call = ast.parse(next(iter(CALLS.values())), mode="eval").body
    assert isinstance(call, ast.Call) and len(asked) == len(call.args) == 1 and isinstance(asked[0], str)


@pytest.mark.parametrize("text", [text for text in TEXTS if text.endswith(("ERROR", "STOP", "FAILED", "memory"))])
def test_each_error_text_of_torch_npu_has_its_class(text: str) -> None:
    row = DEFAULT.of(Observation(1, None, f"RuntimeError: {text}. x", is_failure=True))
    assert row.cause in (CauseClass.DEVICE, CauseClass.NETWORK) or "memory is full" in row.fault


def wheel(path: Path, *, without: str = "") -> Path:
    """Return a wheel with the recorded content except for one text."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, functions in SIGNATURES.items():
            source = "".join(f"def {function}({args}): ...\n" for function, args in functions.items())
            source += f"x.{CALLS[name]}\n" if name in CALLS else ""
            archive.writestr(name, source.replace(without, "") if without else source)
        library = "\0".join(TEXTS)
        archive.writestr(LIBRARY, library.replace(without, "") if without else library)
    return path


def test_wheel_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert differences(wheel(tmp_path / "as.whl")) == []
    assert differences(wheel(tmp_path / "text.whl", without="SUSPECT MEM ERROR")) == [
        f"{LIBRARY}: no 'SUSPECT MEM ERROR'"
    ]
    assert "restart_device" in differences(wheel(tmp_path / "args.whl", without=": int"))[0]
    monkeypatch.setattr("sys.argv", ["x", str(tmp_path / "as.whl")])
    assert torch_npu_wheel.main() == 0 and capsys.readouterr().out == "as recorded\n"


# ---- NCCL, from torch's stubs: CPU builds lack the library


def methods(of: str) -> dict[str, str]:
    """Return the methods of a class in the stubs with their arguments."""
    tree = ast.parse(STUBS.read_text())
    found = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == of)
    return {node.name: ast.unparse(node.args) for node in found.body if isinstance(node, ast.FunctionDef)}


def test_nccl_is_known_by_its_brackets_and_aborts_without_arguments() -> None:
    nccl = methods("ProcessGroupNCCL")
    assert {name: nccl[name] for name in ("abort", "_group_start", "_group_end")} == dict.fromkeys(
        ("abort", "_group_start", "_group_end"), "self"
    )


def test_backend_is_found_beneath_the_wrapper_of_debug_detail() -> None:
    assert hasattr(_ProcessGroupWrapper, "wrapped_pg")
    assert not any(hasattr(_ProcessGroupWrapper, name) for name in ("_group_start", "_group_end"))


def test_backend_connects_for_one_device() -> None:
    assert methods("Backend")["eager_connect_single_device"].startswith("self, device: torch.device")
    helper = inspect.getsource(distributed_c10d._new_process_group_helper)
    assert ".eager_connect_single_device(device_id)" in helper and ".bound_device_id = device_id" in helper
