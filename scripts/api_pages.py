"""Write docs/reference/python-api.md from the docstrings, and bring its Chinese page up to date.

The Chinese page keeps one text for each name, written by hand; headings, signatures and examples come from the code. A
name without such a text is an error. tests/test_readme.py checks that both pages are current.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import sys
import textwrap
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, ForwardRef

import samebits

ROOT = Path(__file__).resolve().parents[1]
ENGLISH = ROOT / "docs/reference/python-api.md"
CHINESE = ROOT / "docs/reference/python-api.zh-CN.md"
WIDTH = 100


@dataclass(frozen=True, slots=True)
class Part:
    """A section of both pages, with its names in order; members of a class follow it by themselves."""

    title: str
    title_zh: str
    names: tuple[str, ...]


PARTS = (
    Part(
        "Start",
        "启动",
        (
            "samebits.init",
            "samebits.get_rank",
            "samebits.get_world_size",
            "samebits.get_local_rank",
            "samebits.is_spare",
            "samebits.status",
            "samebits.JobStatus",
        ),
    ),
    Part(
        "Training",
        "训练",
        (
            "samebits.elastic.run",
            "samebits.elastic.TorchState",
            "samebits.elastic.ObjectState",
            "samebits.elastic.State",
            "samebits.elastic.LocalSGD",
            "samebits.ElasticSampler",
            "samebits.GlobalBatch",
            "samebits.expect_pause",
            "samebits.elastic.load_dcp",
            "samebits.elastic.register_handler",
            "samebits.elastic.StateHandler",
            "samebits.elastic.CommunicationError",
            "samebits.elastic.HostsUpdatedInterrupt",
        ),
    ),
    Part("Checkpoints", "检查点", ("samebits.CheckpointConfig", "samebits.StepLog")),
    Part(
        "Shared data",
        "共享数据",
        (
            "samebits.report",
            "samebits.WorkQueue",
            "samebits.kv.get",
            "samebits.kv.put",
            "samebits.kv.read",
            "samebits.kv.compare_and_set",
            "samebits.kv.add",
            "samebits.kv.delete",
            "samebits.kv.wait",
            "samebits.kv.Versioned",
        ),
    ),
    Part(
        "Parts for use without a job",
        "可脱离作业使用的部分",
        (
            "samebits.HeartbeatDetector",
            "samebits.HealthChecker",
            "samebits.StateSynchronization",
            "samebits.ConsistencyProtocol",
            "samebits.ConsistencyRecovery",
            "samebits.ModelCheckpoint",
            "samebits.CheckpointRecovery",
            "samebits.LossMonitor",
            "samebits.Model",
        ),
    ),
)

MEMBERS: dict[str, tuple[str, ...]] = {
    "samebits.elastic.TorchState": (),
    "samebits.elastic.ObjectState": ("restore",),
    "samebits.elastic.State": (
        "completed_steps",
        "commit",
        "report",
        "flush",
        "check_host_updates",
        "register_reset_callbacks",
        "save",
        "restore",
        "sync",
        "reset",
        "shared_values",
    ),
    "samebits.elastic.LocalSGD": ("completed_steps", "local_steps", "average"),
    "samebits.elastic.StateHandler": ("contents", "load", "is_alike"),
    "samebits.elastic.HostsUpdatedInterrupt": (),
    "samebits.GlobalBatch": ("steps",),
    "samebits.ElasticSampler": (
        "set_epoch",
        "record_batch",
        "record_indices",
        "record_samples",
        "rest_of_epoch",
        "state_dict",
        "load_state_dict",
    ),
    "samebits.CheckpointConfig": (),
    "samebits.StepLog": (),
    "samebits.JobStatus": (),
    "samebits.kv.Versioned": (),
}
"""The members for scripts of classes that the package calls as well; of any other class, every public one."""

SEE = {
    "samebits.elastic.TorchState": ("state", "State and commits", "状态与提交"),
    "samebits.GlobalBatch": (
        "../how-to/elastic-and-autoscale",
        "Equal bits at any world size#equal-bits-at-any-world-size",
        "任意 world size 下比特相同#任意-world-size-下比特相同",
    ),
    "samebits.expect_pause": ("../how-to/hung-and-slow-workers", "Hung and slow workers", "卡住和变慢的 worker"),
    "samebits.CheckpointConfig": ("../how-to/checkpoints", "Checkpoints", "检查点"),
    "samebits.StepLog": ("../how-to/silent-corruption", "Step log#step-log", "步日志#步日志"),
    "samebits.WorkQueue": ("../how-to/shared-data", "Work queues#work-queues", "工作队列#工作队列"),
}
"""The page that explains the use of a name, with the link's text and anchor in each language."""

MODULES = (
    ("samebits.horovod", "horovod/__init__.py", "../how-to/migrate-horovod", "Horovod"),
    ("samebits.ray", "ray.py", "../how-to/ray", "Ray"),
    (
        "samebits.integrations.accelerate",
        "integrations/accelerate.py",
        "../how-to/migrate-frameworks",
        "Accelerate",
    ),
    (
        "samebits.integrations.lightning",
        "integrations/lightning.py",
        "../how-to/migrate-frameworks",
        "Lightning",
    ),
    (
        "samebits.integrations.transformers",
        "integrations/transformers.py",
        "../how-to/migrate-frameworks",
        "Transformers",
    ),
    ("samebits.integrations.tracking", "integrations/tracking.py", "../how-to/monitor", "TensorBoard"),
)
"""Modules that replace those of other frameworks: the file with their names, and the page that explains them."""

WHOLE = ("samebits.horovod", "samebits.ray")
"""Modules whose functions are listed as well as their classes."""

PRELUDE = """\
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import samebits

samebits.init()
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
"""

HEAD = """\
# Python API

[简体中文](python-api.zh-CN.md) · [Documentation](../index.md)

Every public name of `samebits`, `samebits.elastic` and `samebits.kv`; `…` stands for a default that cannot be
printed. All exceptions derive from `samebits.errors.SameBitsError`, and each has an [exit code](exit-codes.md). The
[tutorial](../tutorials/recoverable-script.md) has a complete script. Each example below runs after these lines, in a
script that trains:
"""

HEAD_ZH = """\
# Python API

[English](python-api.md) · [文档](../index.zh-CN.md)

`samebits`、`samebits.elastic` 和 `samebits.kv` 的全部公开名称；`…` 表示不便打印的默认值。\
所有异常都派生自 `samebits.errors.SameBitsError`，各有一个[退出码](exit-codes.zh-CN.md)。\
完整的脚本见[教程](../tutorials/recoverable-script.zh-CN.md)。在会训练的脚本中，下面的每个示例接在这些行之后即可运行：
"""

BEGIN = "<!-- python-api:begin (python scripts/api_pages.py) -->\n"
END = "<!-- python-api:end -->\n"

_ROLE = re.compile(r":(?:class|func|meth|attr|mod):`(?:~[\w.]+\.)?([\w.]+)`")
_SECTION = re.compile(r"^(Args|Attributes|Raises|Example):(:?)$")
_TITLES = {"Args": "Arguments", "Attributes": "Attributes", "Raises": "Raises"}
_ITEM = re.compile(r"^    (\w+(?:, \w+)*): (.*)$")
_TEXT_ZH = re.compile(
    r"^#{3,4} (samebits[\w.]+)\n\n```text\n.*?^```\n\n(.*?)(?=^```py\n|^#{2,4} )", re.MULTILINE | re.DOTALL
)


def documented(name: str) -> object:
    """Return the object with this full name."""
    value: object = samebits
    for part in name.split(".")[1:]:
        value = getattr(value, part)
    return value


def members_of(name: str) -> list[str]:
    """Return the full names of a class's members that scripts use."""
    value = documented(name)
    if not isinstance(value, type) or issubclass(value, Exception):
        return []
    public = [one for one, member in vars(value).items() if not one.startswith("_") and _is_documentable(member)]
    return [f"{name}.{one}" for one in MEMBERS.get(name, public)]


def _is_documentable(member: object) -> bool:
    return isinstance(member, property) or inspect.isfunction(member)


def all_names() -> list[str]:
    """Return every name on the pages, in order."""
    return [one for part in PARTS for name in part.names for one in (name, *members_of(name))]


def signature(name: str) -> str:
    """Return how a name is called, with the types of its parameters."""
    value = documented(name)
    if isinstance(value, property):
        return f"{name}: {value.fget.__annotations__['return']}" if value.fget is not None else name
    try:
        found = inspect.signature(value)  # type: ignore[arg-type]
    except ValueError:  # an exception without a constructor of its own
        return name
    parameters = _parameters(found)
    returned = "" if isinstance(value, type) else f" -> {_shown(found.return_annotation)}"
    line = f"{name}({', '.join(parameters)}){returned}"
    if len(line) <= WIDTH:
        return line
    lines = "".join(f"    {one},\n" for one in parameters)
    return f"{name}(\n{lines}){returned}"


def _parameters(found: inspect.Signature) -> list[str]:
    parameters: list[str] = []
    is_keyword_only = False
    for one in found.parameters.values():
        if one.name == "self":
            continue
        if one.kind is one.VAR_POSITIONAL:
            is_keyword_only = True
        if one.kind is one.KEYWORD_ONLY and not is_keyword_only:
            parameters.append("*")
            is_keyword_only = True
        stars = "*" if one.kind is one.VAR_POSITIONAL else "**" if one.kind is one.VAR_KEYWORD else ""
        default = "" if one.default is one.empty else f" = {_shown_default(one.default)}"
        parameters.append(f"{stars}{one.name}: {_shown(one.annotation)}{default}")
    return parameters


def _shown_default(default: object) -> str:
    if isinstance(default, Enum):
        default = default.value
    if not isinstance(default, bool | int | float | str | tuple | None):
        return "…"
    return repr(default).replace("'", '"')


def _shown(annotation: Any) -> str:
    text = annotation.__forward_arg__ if isinstance(annotation, ForwardRef) else str(annotation)
    text = re.sub(r"InitVar\[(.*)\]$", r"\1", text).replace("Concatenate[AnyState, Parameters]", "...")
    return text.replace("'", '"')


def _plain(text: str) -> str:
    """Turn a docstring's roles and literals into Markdown."""
    return _ROLE.sub(r"`\1`", text).replace("``", "`")


def _english(name: str) -> str:
    """Return a name's docstring as Markdown, without its example."""
    out: list[str] = []
    section, paragraph = "", ""
    items: list[str] = []

    def flush() -> None:
        nonlocal paragraph, items
        if paragraph:
            out.append(_plain(paragraph))
        if items:
            out.append(f"{_TITLES[section]}:")
            out.append("\n".join(items))
        paragraph, items = "", []

    for line in (inspect.getdoc(documented(name)) or "").splitlines():
        header = _SECTION.match(line)
        item = _ITEM.match(line) if section in _TITLES else None
        if header is not None or (line and not line.startswith(" ") and section):
            flush()
            section = header[1] if header is not None else ""
            paragraph = "" if header is not None else line
        elif section == "Example":
            continue
        elif item is not None:
            names = ", ".join(f"`{one}`" for one in item[1].split(", "))
            items.append(f"- {names}: {_plain(item[2])}")
        elif section and line:
            items[-1] += " " + _plain(line.strip())
        elif line:
            paragraph = f"{paragraph} {line}".strip()
        elif not section:
            flush()
    flush()
    assert out, f"{name} has no docstring"
    return "\n\n".join(out)


def example(name: str) -> str:
    """Return the code of a name's example, or "", with two empty lines around definitions as `ruff format` has it."""
    _, found, code = (inspect.getdoc(documented(name)) or "").partition("\nExample::\n\n")
    if not found:
        return ""
    chunks = re.split(r"\n\n(?=\S)", textwrap.dedent(code))
    formatted = chunks[0]
    for before, after in itertools.pairwise(chunks):
        is_definition = any(one.startswith(("@", "class ", "def ")) for one in (before, after))
        formatted += ("\n\n\n" if is_definition else "\n\n") + after
    return formatted + "\n"


def _link(name: str, suffix: str) -> str:
    page, english, chinese = SEE[name]
    text, hash_, anchor = (chinese if suffix else english).partition("#")
    return f"[{text}]({page}{suffix}.md{hash_}{anchor})"


def _entry(name: str, text: str) -> str:
    marks = "###" if name in {one for part in PARTS for one in part.names} else "####"
    code = f"\n```py\n{example(name)}```\n" if example(name) else ""
    return f"{marks} {name}\n\n```text\n{signature(name)}\n```\n\n{text}\n{code}"


def _modules(suffix: str) -> str:
    """Return the table of modules that replace those of other frameworks."""
    rows: dict[str, list[str]] = {}
    links: dict[str, str] = {}
    for module, file, page, title in MODULES:
        source = (ROOT / "runtime/samebits" / file).read_text(encoding="utf-8")
        (found,) = re.findall(r"^__all__ = (\[.*?\])", source, re.MULTILINE | re.DOTALL)
        names = [one for one in ast.literal_eval(found) if module in WHOLE or one[0].isupper()]
        rows.setdefault(module, []).extend(f"`{one}`" for one in names)
        links[module] = f"[{title}]({page}{suffix}.md)"
    comma = "、" if suffix else ", "
    head = "| 模块 | 名称 | 用法 |" if suffix else "| module | names | use |"
    return "\n".join(
        [head, "|---|---|---|", *(f"| `{one}` | {comma.join(rows[one])} | {links[one]} |" for one in rows)]
    )


def english_page() -> str:
    """Return the English page."""
    out = [HEAD, f"```py\n{PRELUDE}```\n", BEGIN]
    for part in PARTS:
        out.append(f"## {part.title}\n")
        for name in part.names:
            for one in (name, *members_of(name)):
                see = f"\n\nSee {_link(one, '')}." if one in SEE else ""
                out.append(_entry(one, _english(one) + see))
    out.append("## Other modules\n")
    out.append("`samebits.elastic.ElasticSampler` is `samebits.ElasticSampler`. Modules for other frameworks:\n")
    out += [_modules("") + "\n", END]
    return "\n".join(out)


def chinese_page(texts: dict[str, str]) -> str:
    """Return the Chinese page.

    Args:
        texts: the text of each name, without the link that follows it.

    Raises:
        KeyError: a name has no text.
    """
    out = [HEAD_ZH, f"```py\n{PRELUDE}```\n", BEGIN]
    for part in PARTS:
        out.append(f"## {part.title_zh}\n")
        for name in part.names:
            for one in (name, *members_of(name)):
                see = f"\n\n见{_link(one, '.zh-CN')}。" if one in SEE else ""
                out.append(_entry(one, texts[one] + see))
    out.append("## 其他模块\n")
    out.append("`samebits.elastic.ElasticSampler` 即 `samebits.ElasticSampler`。用于其他框架的模块：\n")
    out += [_modules(".zh-CN") + "\n", END]
    return "\n".join(out)


def chinese_texts() -> dict[str, str]:
    """Return the texts that are on the Chinese page now."""
    found = _TEXT_ZH.findall(CHINESE.read_text(encoding="utf-8"))
    return {name: re.sub(r"\n\n见\[[^\n]*\)。$", "", text.strip()) for name, text in found}


def main() -> None:
    """Write both pages."""
    texts = chinese_texts()
    missing = [name for name in all_names() if not texts.get(name)]
    if missing:
        sys.exit(f"{CHINESE.name}: no text for {', '.join(missing)}. Fix: add its heading, a text block and a text")
    ENGLISH.write_text(english_page(), encoding="utf-8")
    CHINESE.write_text(chinese_page(texts), encoding="utf-8")


if __name__ == "__main__":
    main()
