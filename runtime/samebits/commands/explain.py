"""``samebits explain``: print the tables of variables, exit codes and causes, for people, web pages and programs.

These are the tables in use: those of ``samebits.config``, ``samebits.exit_codes`` and ``samebits.core.causes.table``.
"""

from __future__ import annotations

import argparse
import json
import signal
import textwrap
from collections.abc import Sequence

from samebits import config, errors
from samebits.core.causes.table import TABLE, CauseClass, Remedy, Retry, Row
from samebits.core.hangs import Hang
from samebits.errors import UsageError
from samebits.exit_codes import EXIT_CODES, ExitCode, exit_code_table, exit_code_table_zh
from samebits.service import cause_file

SAYS: dict[Hang, str] = {
    Hang.STUCK: "worker 2 is in train.py:46 (time.sleep), workers 0 and 1 wait for it in all_reduce #812",
    Hang.BUSY: "worker 2 is in train.py:46 (evaluate) and computes",
    Hang.LOADING: "worker 2 is in train.py:46 (read) and waits for data",
    Hang.SAVING: "worker 2 is in train.py:46 (state.commit) and waits for the disk of CHECKPOINT_PATH",
    Hang.COMPILING: "worker 2 is in train.py:46 (model) and compiles",
    Hang.APART: "worker 2 is in another collective, all_reduce #811",
    Hang.LINK: "all workers wait in the same collective, all_reduce #812, and none leaves it",
    Hang.NOBODY_WAITS: "and no rank waits for another",
}
"""Example messages for a stall that its process reports, after ``no step for 12 s:``."""

_CLASSES_ZH = {
    CauseClass.NODE: "节点",
    CauseClass.NETWORK: "网络",
    CauseClass.STORAGE: "存储",
    CauseClass.SOFTWARE: "软件",
    CauseClass.DATA: "数据",
    CauseClass.DEVICE: "设备",
    CauseClass.UNKNOWN: "未知",
}
_STRATEGIES_ZH = {
    Remedy.WAIT: "等待",
    Remedy.SPARE: "热备接替",
    Remedy.RESTART: "重启",
    Remedy.SHRINK: "缩小",
    Remedy.ROLL_BACK: "回滚",
    Remedy.DRAIN: "撤出",
    Remedy.STOP: "结束作业",
}
_RETRIES = {Retry.YES: "forever", Retry.ONCE: "once", Retry.NO: "no", Retry.OVER: "–"}
_RETRIES_ZH = {Retry.YES: "一直", Retry.ONCE: "一次", Retry.NO: "否", Retry.OVER: "–"}

_ZH: dict[str, tuple[str, str]] = {  # by fault: its name, and the fix
    "the job ended, and this process with it": ("作业已结束，本进程随之结束", "查看作业结束的原因：其根本原因"),
    "a setting, a secret or a folder is wrong, or this machine computes differently": (
        "设置、密钥或目录有误，或本机的计算方式不同",
        "信息中并列了实际的值与期望的值",
    ),
    "it lost its seat, its scheduler or its group, or did not leave a collective": (
        "失去席位、scheduler 或通信组，或未能从集合通信中出来",
        "无需处理；若持续出现，检查主机之间的网络",
    ),
    "its host or device did not pass a check": (
        "主机或设备未通过检查",
        "在另一台主机上启动，或检修信息中指出的部件",
    ),
    "another scheduler has taken over the job": (
        "另一个 scheduler 已接管作业",
        "无需处理：作业由信息中写明的那个 scheduler 继续",
    ),
    "the kernel killed it for lack of memory": (
        "内存不足，被内核杀死",
        "提高内存上限，或减少本机的 worker 或数据加载进程",
    ),
    "no memory was left on its host or within its memory limit": (
        "主机或其上限已没有内存可用",
        "提高内存上限，或减少本机的 worker 或数据加载进程",
    ),
    "a DataLoader's worker process was killed": (
        "DataLoader 的工作进程被杀死",
        "提高内存上限或 /dev/shm 的大小，或减少数据加载进程",
    ),
    "an accelerator failed": (
        "加速卡发生故障",
        "停用该设备：驱动日志（dmesg、nvidia-smi -q、npu-smi info）会指明是哪一块",
    ),
    "an accelerator's memory is full": (
        "加速卡显存已满",
        "减小 batch，或减少共用该设备的进程：信息中写明是哪块设备、其中有什么",
    ),
    "its device was stopped to end a collective that could not end": (
        "设备被停止，好让无法结束的集合通信结束",
        "无需处理：通信组被打断时由运行时停止",
    ),
    "a rank computed a wrong gradient twice: the state may contain the error": (
        "某个 rank 两次算错梯度：状态可能含有该错误",
        "检测信息中指明的设备，并在其他主机上从指明的检查点继续",
    ),
    "its process had too many files open": (
        "其进程打开的文件过多",
        "提高打开文件数的上限（`ulimit -n`），或让脚本关闭它打开的文件",
    ),
    "a disk or network folder failed or is full": ("磁盘或网络目录故障或已满", "腾出空间，或修复信息中指明的磁盘"),
    "the ranks called different collectives, or passed tensors of different sizes": (
        "各 rank 调用了不同的集合通信，或给出了大小不同的张量",
        "每个 rank 必须以相同大小的张量调用相同的集合通信：查看所给出的行",
    ),
    "a connection broke": ("连接中断", "检查信息中所列主机之间的网络"),
    "it crashed in compiled code": (
        "在编译代码中崩溃",
        "查看日志中给出的行；升级该库",
    ),
    "it was asked to leave, by a preemption, a scale-down or a person": (
        "被要求离开：抢占、缩容或人为",
        "无需处理；它完成当前一步后离开",
    ),
    "it was interrupted (SIGINT), by a person or a launcher": (
        "被人或启动器中断（SIGINT）",
        "无需处理；若持续出现，查明是谁发出的信号",
    ),
    "it was killed by a signal": ("被信号杀死", "无需处理；若持续出现，查明是谁发出的信号"),
    "a loss or gradient is not finite": ("loss 或梯度不是有限值", "检查所指那一步的样本与学习率"),
    "a sample cannot be read": ("某个样本无法读取", "修复或剔除该样本：traceback 指明所在行"),
    "the script failed": ("脚本失败", "改正脚本：信息中指明所在行"),
    "it exited with a status of its own": ("以自己的状态码自行结束", "查看其日志末尾"),
    "its main thread is stuck: it is sleeping, or waiting for a lock or another program": (
        "主线程停住：在睡眠，或在等锁、等别的程序",
        "查看所指的行；长时间停顿之前调用 samebits.expect_pause(seconds)",
    ),
    "it is computing while the others wait for it": (
        "它在计算，其他 worker 在等它",
        "查看所指的行；在单个 rank 上评估之前调用 samebits.expect_pause(seconds)",
    ),
    "its data does not arrive": ("数据迟迟不来", "检查数据集所在的存储，以及所指的行"),
    "its commit does not finish": ("commit 迟迟不结束", "检查 CHECKPOINT_PATH 所在的磁盘"),
    "it has been compiling for too long": ("编译时间过长", "设置 COMPILE_CACHE_PATH，或分成小块编译"),
    "the ranks are in different collectives": (
        "各 rank 处于不同的集合通信",
        "各 rank 必须以同样的顺序调用同样的集合通信：检查是否有 `if` 包着其中之一",
    ),
    "all ranks wait in the same collective": ("全体都等在同一个集合通信里", "检查主机之间的网络"),
    "no rank makes progress, and none waits for another": (
        "没有 rank 前进，也没有谁在等谁",
        "全体都要停顿之前调用 samebits.expect_pause(seconds)",
    ),
    "its process is stopped": ("进程被停住", "kill -CONT <pid>"),
    "a debugger holds its process": ("进程被调试器控制", "让调试器继续，或将其分离"),
    "its code holds Python's lock": (
        "其代码占住 Python 的锁",
        "在所指的调用中释放锁：用 ctypes.CDLL 代替 PyDLL，C 代码中用 Py_BEGIN_ALLOW_THREADS",
    ),
    "its process is waiting in the kernel": (
        "进程在内核中等待",
        "检查其磁盘与网络目录：以 root 执行 cat /proc/<pid>/stack",
    ),
    "it is cut off from the scheduler": ("与 scheduler 断网", "检查其主机与 SCHED_HOST 之间的网络"),
    "its process is gone without a message": (
        "进程一声不响地消失",
        "无需处理；`samebits logs` 与 dmesg 或可说明是谁杀死的",
    ),
    "its connection is gone, and its process is not visible": (
        "连接已断，且无人能看到其进程",
        "检查其主机以及通往它的网络",
    ),
    "a rank's weights or moments were silently corrupted": (
        "某个 rank 的权重或动量自行改变",
        "检测所指主机或设备的内存：memtester、nvidia-smi -q -d ECC、npu-smi info -t ecc",
    ),
    "it is silent, and its process is not visible": (
        "没有消息，且无人能看到其进程",
        "检查其主机以及通往它的网络",
    ),
    "the cause of its end is unknown": ("无人知道它如何结束", "查看其日志末尾"),
}


def heading(row: Row) -> str:
    """Return a row's fault, class and reaction as one line."""
    return f"{row.fault}: {row.cause.value}; tried again: {_RETRIES[row.retry]}; {_strategies(row)}"


def says(row: Row) -> str:
    """Return an example message for this cause."""
    parts = [SAYS.get(hang, f"it {hang.value}") for hang in sorted(row.hangs, key=lambda one: one.name)]
    parts += [notice.value for notice in row.notices]
    parts += row.texts
    if row.is_out_of_memory:
        parts.append("out of memory (the kernel's limit for its control group, 8.00 GiB)")
    if row.is_failure and not row.texts:
        parts.append("failed at train.py:88: KeyError: 'x'")
    if row.statuses and len(row.statuses) < 256:
        parts += sorted(kind.__name__ for kind in _errors() if kind.exit_code in row.statuses)
    elif row.statuses:
        parts.append("ended with status 3")
    if row.signals:
        names = sorted(signal.Signals(one).name for one in row.signals if len(row.signals) < 9)
        parts += names or ["was killed by signal 9 (SIGKILL)"]
    return " / ".join(parts)


def cause_table() -> str:
    """Return the table of docs/reference/messages.md: markdown, one row per cause, no trailing newline."""
    head = ["| fault | what the message says | class | again? | what is done | fix |", "|---|---|---|---|---|---|"]
    rows = [(row.fault, _quoted(row), row.cause.value, _RETRIES[row.retry], _strategies(row), row.fix) for row in TABLE]
    return "\n".join([*head, *(f"| {' | '.join(map(_cell, row))} |" for row in rows)])


def cause_table_zh() -> str:
    """Return the same table for docs/reference/messages.zh-CN.md."""
    head = ["| 故障 | 信息内容 | 类别 | 重试？ | 处理 | 修复 |", "|---|---|---|---|---|---|"]
    rows = []
    for row in TABLE:
        fault, fix = _ZH[row.fault]
        done = "、".join(_STRATEGIES_ZH[one] for one in row.strategies)
        rows.append((fault, _quoted(row), _CLASSES_ZH[row.cause], _RETRIES_ZH[row.retry], done, fix))
    return "\n".join([*head, *(f"| {' | '.join(map(_cell, row))} |" for row in rows)])


def plain(row: Row) -> dict[str, object]:
    """Return a row as plain values, for programs."""
    return {
        "fault": row.fault,
        "says": says(row),
        "class": row.cause.value,
        "again": _RETRIES[row.retry],
        "strategies": [one.value for one in row.strategies],
        "fix": row.fix,
    }


def _strategies(row: Row) -> str:
    return ", ".join(one.value for one in row.strategies)


def _quoted(row: Row) -> str:
    text = says(row)
    return f"`{text}`" if text else "–"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<pid>", "`<pid>`")


def _errors() -> list[type[errors.SameBitsError]]:
    kinds = [value for value in vars(errors).values() if isinstance(value, type)]
    return [one for one in kinds if issubclass(one, errors.SameBitsError) and one is not errors.SameBitsError]


_WIDTH = 100
_COLUMNS = ("name", "default", "value", "meaning")
_TOPICS = ("variables", "exit-codes", "causes")


def main(arguments: Sequence[str]) -> int:
    """Run the subcommand."""
    parser = argparse.ArgumentParser(
        prog="samebits explain",
        description="Print every environment variable of a job, the meaning of each exit code, or the causes of "
        "failures and the job's reaction to each, beginning with your own causes (CAUSE_TABLE). A number explains "
        "one exit code, and a variable's name that variable.",
    )
    parser.add_argument("topic", metavar="|".join((*_TOPICS, "CODE", "VARIABLE")))
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print a list of JSON objects")
    form.add_argument("--markdown", action="store_true", help="print the table of the page in docs/")
    form.add_argument("--zh", action="store_true", help="print the table of the Chinese page in docs/")
    options = parser.parse_args(arguments)
    if options.topic == "variables":
        _variables(options)
    elif options.topic == "exit-codes":
        _exit_codes(EXIT_CODES, options)
    elif options.topic == "causes":
        _causes(options)
    elif row := next((one for one in config.environment_rows() if one[0] == options.topic.upper()), None):
        _variable(row, options)
    else:
        _exit_codes(_of_number(options.topic, parser), options)
    return 0


def _of_number(text: str, parser: argparse.ArgumentParser) -> tuple[ExitCode, ...]:
    if not (text.isdecimal() and text.isascii() and len(text) <= 3):
        parser.error(f"{text[:40]!r}: expected {', '.join(_TOPICS)}, an exit code or a variable's name")
    found = tuple(one for one in EXIT_CODES if one.code == int(text))
    if not found:
        raise UsageError(
            f"exit code {text} is not a SameBits exit code: it comes from the script, from Python or from a signal "
            "(128 + its number). Fix: read the last lines of the process with `samebits logs`"
        )
    return found


def _variables(options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps([dict(zip(_COLUMNS, row, strict=True)) for row in config.environment_rows()]))
    else:
        print(config.environment_table_zh() if options.zh else config.environment_table())


def _variable(row: Sequence[str], options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps([dict(zip(_COLUMNS, row, strict=True))]))
        return
    name, default, value, meaning = row
    print(f"{name}  default: {default}; value: {value}")
    print(textwrap.fill(meaning, _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6))


def _exit_codes(shown: Sequence[ExitCode], options: argparse.Namespace) -> None:
    if options.json:
        rows = [{"code": one.code, "name": one.name, "again": one.again.value, "meaning": one.meaning} for one in shown]
        print(json.dumps(rows))
    elif options.markdown or options.zh:
        print(exit_code_table_zh() if options.zh else exit_code_table())
    else:
        width = max(len(one.name) for one in shown)
        print(f"code  {'name':<{width}}  again?")
        for one in shown:
            print(f"{one.code:>4}  {one.name:<{width}}  {one.again.value}")
            print(textwrap.fill(one.meaning, _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6))


def _causes(options: argparse.Namespace) -> None:
    if options.markdown or options.zh:
        print(cause_table_zh() if options.zh else cause_table())
        return
    settings, _ = config.read(config.whole_environment(), role_required=False)
    rows = (*cause_file.table_of(settings).own, *TABLE)
    if options.json:
        print(json.dumps([plain(row) for row in rows]))
        return
    for row in rows:
        print(heading(row))
        for text in (says(row), row.fix):
            if text:
                print(textwrap.fill(text, _WIDTH, initial_indent="      ", subsequent_indent="      "))
