"""Expressions are evaluated without running code of the script, and calls that use files are recognized."""

from __future__ import annotations

import argparse
import ast
import os
from pathlib import Path, PurePath
from typing import Any

import pytest
import torch

from samebits.training.state.script.expressions import file_use, value_of
from samebits.training.state.script.fingerprints import MISSING


def look(name: str) -> Any:
    """Return a new object, because other tests of this process may change all optimizers that there are."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5, momentum=0.25)
    names = {
        "optimizer": optimizer,
        "schedule": torch.optim.lr_scheduler.StepLR(optimizer, step_size=5),
        "args": argparse.Namespace(out="runs", name="a", number=3),
        "out": Path("runs"),
        "os": os,
    }
    return names.get(name, MISSING)


def parsed(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("optimizer.param_groups[0]['lr']", 0.5),
        ("optimizer.param_groups[-1].get('momentum')", 0.25),
        ("[group['lr'] * 2 for group in optimizer.param_groups]", [1.0]),
        ("max(group['lr'] for group in optimizer.param_groups)", 0.5),
        ("float(schedule.get_last_lr()[0]) - 0.25", 0.25),
        ("out / 'best.pt'", PurePath("runs/best.pt")),
        ("os.path.join(args.out, f'{args.name}-{args.number}.pt')", PurePath("runs/a-3.pt")),
        ("args.out + '/last.pt'", "runs/last.pt"),
        ("Path(args.out, 'last.pt')", PurePath("runs/last.pt")),
        ("optimizer.param_groups[9]['lr']", MISSING),
        ("args.number / 0", MISSING),
        ("unknown + 1", MISSING),
        ("make(args.out)", MISSING),
        ("[group['lr'] for group in optimizer.param_groups if group]", MISSING),
    ],
)
def test_value_of_a_simple_expression(text: str, value: object) -> None:
    assert value_of(parsed(text), look) == value


@pytest.mark.parametrize(
    ("text", "reads", "writes", "appends"),
    [
        ("torch.load('a.pt', map_location='cpu')", "a.pt", "", ""),
        ("torch.save(model, out / 'a.pt')", "", "runs/a.pt", ""),
        ("np.save('a.npy', array)", "", "a.npy", ""),
        ("open('a.txt')", "a.txt", "", ""),
        ("open('a.txt', 'wb')", "", "a.txt", ""),
        ("open('a.txt', mode='a')", "", "", "a.txt"),
        ("open('a.txt', 'r+')", "a.txt", "", "a.txt"),
        ("out.open('w')", "", "runs", ""),
        ("out.read_text()", "runs", "", ""),
        ("out.write_text(text)", "", "runs", ""),
        ("os.replace('a.tmp', 'a.pt')", "a.tmp", "a.pt", ""),
        ("out.rename('b.pt')", "runs", "b.pt", ""),
        ("args.name.replace('a', 'b')", "", "", ""),
        ("pickle.load(file)", "", "", ""),
        ("values.copy()", "", "", ""),
        ("print('a.pt')", "", "", ""),
    ],
)
def test_files_of_a_call(text: str, reads: str, writes: str, appends: str) -> None:
    call = parsed(text)
    assert isinstance(call, ast.Call)
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    used = file_use(call, name, look)
    wanted = [{(f"file {file}",)} if file else set() for file in (reads, writes, appends)]
    assert [used.reads, used.writes, used.appends] == wanted
