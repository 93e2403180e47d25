"""Exit codes of all processes, and whether starting the same command again can help.

docs/reference/exit-codes.md and ``samebits explain exit-codes`` print this table. A code keeps its meaning until a new
major version, because restart loops, Slurm and Kubernetes base decisions on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from samebits import errors


class Repeatable(Enum):
    """Whether the same command can succeed when it is started again."""

    YES = "yes"
    NO = "no"
    DONE = "–"


YES, NO, DONE = Repeatable.YES, Repeatable.NO, Repeatable.DONE


@dataclass(frozen=True, slots=True)
class ExitCode:
    """One row: the code, its name, whether starting again helps, and its meaning in both languages."""

    code: int
    name: str
    again: Repeatable
    meaning: str
    meaning_zh: str


def _of(error: type[errors.SameBitsError], again: Repeatable, meaning_zh: str) -> ExitCode:
    meaning = " ".join((error.__doc__ or "").partition("\n\n")[0].split()).replace("``", "`")
    return ExitCode(error.exit_code, error.__name__, again, meaning, meaning_zh)


EXIT_CODES: tuple[ExitCode, ...] = (
    ExitCode(
        *(0, "finished", DONE),
        "The job, or this process's part of the job, is finished.",
        "作业（或本进程负责的部分）已完成。",
    ),
    ExitCode(
        *(1, "script failed", NO),
        "For a worker: the script failed. The traceback is in the worker's log, and the line in the first cause.",
        "worker：脚本自身失败，其 traceback 在日志中，出错的行在根本原因里。",
    ),
    ExitCode(
        *(errors.WRONG_WORDS, "wrong words", NO),
        "A command was called with unknown arguments; nothing was done.",
        "命令收到了它不认识的参数；没有做任何事。",
    ),
    _of(errors.SettingsError, NO, "一个或多个环境变量有误；信息中每个占一行。"),
    _of(errors.FencedError, NO, "scheduler 已让另一个进程以此节点名就位；本进程不得再接触作业。"),
    _of(errors.DuplicateNodeError, YES, "某个存活进程占用此 NODE_ID，且在 TOPO_TIMEOUT 内没有离开。"),
    _of(errors.SchedulerUnreachableError, YES, "未在训练的进程在 TOPO_TIMEOUT 内没有联系上 scheduler。"),
    _of(errors.RefusedError, NO, "scheduler 永远不会接纳此进程；信息中并列双方的值。"),
    _of(errors.NumericsError, NO, "线程数、torch 版本、设备类型或确定性开关与作业启动时不同。"),
    _of(errors.FormationTimeoutError, YES, "一轮组网等待了 TOPO_TIMEOUT；信息中列出缺席的成员。"),
    _of(errors.StoreError, YES, "磁盘上的内容无法照原样使用；没有更改或删除任何东西。"),
    _of(
        errors.ClaimRemovedError,
        YES,
        "RECOVERY_PATH 或其中 scheduler 的任期文件被删除，且没有别的 scheduler 取得任期。",
    ),
    _of(errors.JournalDamagedError, YES, "记录簿中最后一条之前的某条记录校验失败。"),
    _of(errors.ForeignFolderError, NO, "记录簿、检查点或日志目录带有另一个作业的 id，或在跟随期间被移走。"),
    _of(errors.LockedError, YES, "另一个存活进程持有锁；信息中写明是谁。"),
    _of(errors.CheckpointError, YES, "某个恢复点无法使用；信息中写明是哪个以及原因。"),
    _of(errors.ListenError, YES, "无法监听 SCHED_HOST:SCHED_PORT；能查到占用者时会写明。"),
    _of(errors.JobFailedError, NO, "ENABLE_RECOVERY=0 时有进程死亡，作业因此结束；信息即根本原因。"),
    _of(errors.JobInterruptedError, YES, "已没有 worker，而作业尚未完成；其记录簿和检查点完好。"),
    _of(errors.JobStoppedError, NO, "用户要求结束作业；`samebits recover` 从最新检查点继续。"),
    _of(errors.StuckError, YES, "套接字断开后集合通信仍未结束；本进程放弃席位。"),
    _of(errors.UsageError, NO, "本包的某个调用在该处无法工作；信息中写明那里应该用哪个调用。"),
    _of(errors.AnomalyError, NO, "报告的损失或梯度范数不可能出自正常训练，而 LOSS_ANOMALY=stop。"),
    _of(errors.KeyValueError, NO, "`samebits.kv` 的某个调用被拒绝：达到了某个上限，或值不是该调用所需的。"),
    _of(errors.ProtocolError, NO, "收到的字节不是本协议的消息；发送者被拒绝并计数。"),
    _of(errors.LayoutError, NO, "梯度分桶在 rank 之间或与恢复点不一致：继续训练会悄然发散。"),
    _of(errors.CommunicationError, YES, "因组内有成员消失，集合通信失败。"),
    _of(errors.GenerationEndedError, YES, "本进程所在的 generation 已结束：有成员丢失，或开启了新一轮组网。"),
    _of(
        errors.HostsUpdatedInterrupt,
        YES,
        "没有成员丢失，但成员有增减：由 commit 抛出，本 rank 在此完整地离开当前 generation。",
    ),
    _of(errors.SchedulerLeftError, YES, "scheduler 被要求结束（SIGTERM）；作业继续，可由另一个 scheduler 接手。"),
    _of(errors.SecretError, NO, "scheduler 的 CLUSTER_SECRET 与本进程不同，或只有一方设置了密钥。"),
    _of(errors.DivergenceError, NO, "恢复后重做的某一步与步日志中的记录不同；消息说明是哪一步、哪里不同。"),
    _of(
        errors.ScriptFailedError, NO, "已无 worker 存活，其中多数因脚本自身的错误而结束；消息给出第一个错误及其所在行。"
    ),
    _of(errors.UntrainedError, NO, "脚本已结束，但从未在作业中训练：没有调用 `samebits.elastic.run`，或它没有返回。"),
    _of(
        errors.UnequalError,
        NO,
        "各 rank 的参数、优化器的矩、步数、数据位置或被审计的梯度不同；消息说明是哪个 rank 以及原因。",
    ),
    _of(errors.KeyValueTimeoutError, YES, "`samebits.kv` 的某个调用未按时得到答复；更改是否完成无从得知。"),
    _of(errors.SupersededError, NO, "另一个 scheduler 已在 RECOVERY_PATH 中取得更高的任期；作业由它继续。"),
    _of(errors.LevelsSpentError, NO, "进程在其下各级都已重试到 RECOVER_STRATEGY 规定的次数：需要重启整个作业。"),
    _of(errors.PreflightError, YES, "本机的设备、内存或磁盘未能正常工作（PREFLIGHT=1）；它不占用席位。"),
    _of(errors.PointsLostError, NO, "记录簿记载了恢复点，但内存、副本和磁盘上都没有；信息中写明查找过的位置。"),
    _of(errors.HiddenStateError, NO, "从同一次提交重做的某一步结果不同，或有恢复无法还原的变化；详见信息。"),
    _of(errors.AbortHungError, YES, "中止已断开的组的通信器未在时限内返回；本进程放弃席位。"),
    _of(errors.DeviceLostError, YES, "断开之后，本进程无法再在其设备上分配、计算和复制；它放弃席位。"),
    ExitCode(
        *(130, "interrupted", NO),
        "Ctrl-C ended only this command or process.",
        "Ctrl-C 结束了该命令或该进程本身。",
    ),
    ExitCode(
        *(137, "SIGKILL", YES),
        "The process was killed by signal 9, by a person, or by the kernel for lack of memory.",
        "被信号 9 杀死：由人发出，或因内存不足由内核发出。",
    ),
    ExitCode(
        *(143, "asked to leave", NO),
        "The worker was asked to leave (SIGTERM) and has finished its step.",
        "worker 被要求离开（SIGTERM），并已完成当前一步。",
    ),
)


def exit_code_table() -> str:
    """Return the table of docs/reference/exit-codes.md: markdown, a row per entry, no trailing newline."""
    rows = ["| code | name | again? | meaning |", "|---|---|---|---|"]
    return "\n".join(
        [*rows, *(f"| {one.code} | `{one.name}` | {one.again.value} | {one.meaning} |" for one in EXIT_CODES)]
    )


def exit_code_table_zh() -> str:
    """Return the same table for docs/reference/exit-codes.zh-CN.md."""
    rows = ["| 退出码 | 名称 | 重试有用？ | 含义 |", "|---|---|---|---|"]
    words = {YES: "是", NO: "否", DONE: "–"}
    return "\n".join(
        [*rows, *(f"| {one.code} | `{one.name}` | {words[one.again]} | {one.meaning_zh} |" for one in EXIT_CODES)]
    )


def codes_to_give_up_at() -> tuple[int, ...]:
    """Return the codes at which a restart loop must end."""
    return tuple(sorted({one.code for one in EXIT_CODES if one.again is NO}))
