"""Every error SameBits raises, with the exit code a process leaves with when it is not caught.

::

    SameBitsError                     1   base; never raised itself
    ├── SettingsError                64   the environment does not say what this process is to do
    ├── FencedError                  65   this process was replaced while it could not be heard
    ├── DuplicateNodeError           66   another live process holds this NODE_ID
    ├── SchedulerUnreachableError    67   no scheduler answered for TOPO_TIMEOUT
    ├── RefusedError                 68   other job, other settings, unknown protocol, no seat
    ├── NumericsError                69   this process would compute different bits than the group
    ├── FormationTimeoutError        70   a round waited TOPO_TIMEOUT for its members
    ├── StoreError                   71   what is on disk cannot be used as it stands
    │   ├── ClaimRemovedError        71   RECOVERY_PATH, or the scheduler's claim in it, was removed
    │   ├── JournalDamagedError      71   a record in the middle of the journal is not what was written
    │   ├── ForeignFolderError       72   the folder belongs to another job
    │   ├── LockedError              73   another live process writes there
    │   ├── CheckpointError          74   one point cannot be used: torn, flipped, incomplete
    │   └── PointsLostError          94   every copy of the job's restore points is gone
    ├── ListenError                  75   the scheduler's address cannot be listened on
    ├── JobFailedError               76   a death ended the job (ENABLE_RECOVERY=0)
    ├── JobInterruptedError          77   the job stopped unfinished; recover.sh goes on from there
    ├── JobStoppedError              78   somebody asked the job to stop
    ├── StuckError                   79   this process could not leave a blocked collective
    ├── UsageError                   80   the runtime's calls are in an order that cannot work
    │   ├── AnomalyError             80   a reported loss is not a number, or far out of its band (LOSS_ANOMALY=stop)
    │   └── KeyValueError            80   a call of samebits.kv was refused
    │       └── KeyValueTimeoutError 90   a call of samebits.kv was not answered in time
    ├── ProtocolError                81   bytes from a peer that are not a message (counted, never fatal)
    ├── LayoutError                  82   a model's gradient buckets are not those of the restore point
    ├── SchedulerLeftError           84   the scheduler was ended by SIGTERM; its job goes on without it
    ├── SecretError                  85   this process and the scheduler do not share one CLUSTER_SECRET
    ├── DivergenceError              86   a step that was done again was another one than its record in the step log
    ├── ScriptFailedError            87   the script's own error ended its workers; fixed, recover.sh goes on from there
    ├── UntrainedError               88   the script ended and never trained with the others
    ├── UnequalError                 89   the ranks did not hold the same state; nothing of it counts as finished
    ├── SupersededError              91   another scheduler has claimed the job; this one has stopped
    ├── LevelsSpentError             92   a process was tried again as often as may be; the whole job has to be
    ├── PreflightError               93   this host's device, memory or disk does not do what it should
    ├── HiddenStateError             95   a step taken twice from one commit came out different (HIDDEN_STATE=stop)
    ├── AbortHungError               96   aborting a broken group's communicators did not return
    ├── DeviceLostError              97   after a break, this process could no longer use its device
    └── CommunicationError           83   the group lost a member; recovery handles it inside ``elastic.run``
        └── GenerationEndedError     83   this process's generation is over; ``elastic.run`` re-enters
            └── HostsUpdatedInterrupt 83  the members are about to change; ``elastic.run`` re-enters

Every message names the variable or file, the value found, what was expected, and the command that fixes it.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "AbortHungError",
    "AnomalyError",
    "CheckpointError",
    "ClaimRemovedError",
    "CommunicationError",
    "DeviceLostError",
    "DivergenceError",
    "DuplicateNodeError",
    "FencedError",
    "ForeignFolderError",
    "FormationTimeoutError",
    "GenerationEndedError",
    "HiddenStateError",
    "HostsUpdatedInterrupt",
    "JobFailedError",
    "JobInterruptedError",
    "JobStoppedError",
    "JournalDamagedError",
    "KeyValueError",
    "KeyValueTimeoutError",
    "LayoutError",
    "ListenError",
    "LockedError",
    "NumericsError",
    "PointsLostError",
    "PreflightError",
    "ProtocolError",
    "RefusedError",
    "SameBitsError",
    "SchedulerLeftError",
    "SchedulerUnreachableError",
    "ScriptFailedError",
    "SecretError",
    "SettingsError",
    "StoreError",
    "StuckError",
    "SupersededError",
    "UnequalError",
    "UntrainedError",
    "UsageError",
]


class SameBitsError(Exception):
    """Base of every error of this package; ``exit_code`` is the status an uncaught one ends the process with."""

    exit_code: ClassVar[int] = 1


class SettingsError(SameBitsError):
    """One or more environment variables are wrong; all of them are in the message, a line each."""

    exit_code = 64

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class FencedError(SameBitsError):
    """The scheduler seated another process under this node id; this one must not touch the job again."""

    exit_code = 65

    def __init__(self, text: str, *, may_return: bool = False) -> None:
        super().__init__(text)
        self.may_return = may_return  # its slot is another node's, its node id nobody's: it may come back as a spare


class DuplicateNodeError(SameBitsError):
    """A live process holds this node id and did not go away within TOPO_TIMEOUT."""

    exit_code = 66


class SchedulerUnreachableError(SameBitsError):
    """A process that is not training heard no scheduler for TOPO_TIMEOUT."""

    exit_code = 67


class RefusedError(SameBitsError):
    """The scheduler will never admit this process; the message shows both sides' values."""

    exit_code = 68


class NumericsError(SameBitsError):
    """Threads, torch version, device type or deterministic flags differ from those the job was started with."""

    exit_code = 69


class FormationTimeoutError(SameBitsError):
    """A round waited TOPO_TIMEOUT; the message names the missing members."""

    exit_code = 70


class StoreError(SameBitsError):
    """Something on disk cannot be used as it stands; nothing was changed or deleted."""

    exit_code = 71
    may_pass = False
    """Whether the same call may succeed later: the disk is full, say, and nothing is wrong with the settings."""


class ClaimRemovedError(StoreError):
    """RECOVERY_PATH, or the scheduler's claim in it, was removed, and no other scheduler has claimed the job."""


class JournalDamagedError(StoreError):
    """A record before the journal's last one fails its checksum."""


class ForeignFolderError(StoreError):
    """A journal, checkpoint or log folder carries another job's id, or was moved while its job was followed."""

    exit_code = 72


class LockedError(StoreError):
    """Another live process holds the lock; the message names it."""

    exit_code = 73


class CheckpointError(StoreError):
    """One restore point cannot be used; the message names it and the reason."""

    exit_code = 74


class PointsLostError(StoreError):
    """The journal knows a restore point, and no memory, copy or disk holds any; the message says what was searched."""

    exit_code = 94


class ListenError(SameBitsError):
    """SCHED_HOST:SCHED_PORT cannot be listened on; the message names the process that holds it, if that can be read.

    Args:
        is_taken: another process listens there, so another port may do.
    """

    exit_code = 75

    def __init__(self, message: str, *, is_taken: bool = False) -> None:
        super().__init__(message)
        self.is_taken = is_taken


class JobFailedError(SameBitsError):
    """With ENABLE_RECOVERY=0 one process died, so the job ended; the message is the first cause."""

    exit_code = 76


class JobInterruptedError(SameBitsError):
    """No worker is left and the job is not finished; its journal and checkpoints are whole."""

    exit_code = 77


class JobStoppedError(SameBitsError):
    """The user asked for the job to end; ``recover.sh`` goes on from its newest checkpoint."""

    exit_code = 78


class SchedulerLeftError(SameBitsError):
    """The scheduler was asked to end (SIGTERM); the job goes on, and another scheduler may take it up."""

    exit_code = 84


class SupersededError(SameBitsError):
    """Another scheduler has claimed a later term in RECOVERY_PATH; the job goes on with that one, not with this one."""

    exit_code = 91


class SecretError(SameBitsError):
    """The scheduler has another CLUSTER_SECRET than this process, or only one of the two has any."""

    exit_code = 85


class StuckError(SameBitsError):
    """A collective did not end after its sockets were broken; the process gives up its seat."""

    exit_code = 79


class UsageError(SameBitsError):
    """A call of this package cannot work where it was made; the message says which call belongs there."""

    exit_code = 80


class KeyValueError(UsageError):
    """A call of ``samebits.kv`` was refused: a bound is met, or the value is not what the call needs."""


class KeyValueTimeoutError(KeyValueError, TimeoutError):
    """A call of ``samebits.kv`` was not answered in time; whether a change was done is not known."""

    exit_code = 90


class AnomalyError(UsageError):
    """A reported loss or gradient norm is none that training can have, and LOSS_ANOMALY=stop."""


class ProtocolError(SameBitsError):
    """Bytes that are not a message of this protocol; the sender is refused and counted."""

    exit_code = 81


class LayoutError(SameBitsError):
    """Gradient buckets differ between ranks or from the restore point: training on would diverge silently."""

    exit_code = 82


class DivergenceError(SameBitsError):
    """A step that was done again after a recovery is not the one in the step log; the message says which and how."""

    exit_code = 86


class ScriptFailedError(SameBitsError):
    """No worker is left, and errors of the script itself ended most of them; the message names the first, by line."""

    exit_code = 87


class UnequalError(SameBitsError):
    """Parameters, moments, steps, positions or audited gradients of ranks differ; the message says whose and why."""

    exit_code = 89


class UntrainedError(SameBitsError):
    """The script came to its end and never trained in the job: ``samebits.elastic.run`` was not called, or not left."""

    exit_code = 88


class LevelsSpentError(SameBitsError):
    """A process was tried again as often as RECOVER_ATTEMPTS says, at every level below: the whole job has to be."""

    exit_code = 92


class PreflightError(SameBitsError):
    """The device, memory or disk of this host does not do what it should (PREFLIGHT=1); it takes no seat."""

    exit_code = 93


class HiddenStateError(SameBitsError):
    """A step taken twice from one commit came out different, or a value changed outside the state; see the message."""

    exit_code = 95


class AbortHungError(SameBitsError):
    """Aborting a broken group's communicators did not return in time; the process gives up its seat."""

    exit_code = 96


class DeviceLostError(SameBitsError):
    """After a break this process could no longer allocate, compute and copy on its device; it gives up its seat."""

    exit_code = 97


class CommunicationError(SameBitsError):
    """A collective failed because a member of the group is gone."""

    exit_code = 83


class GenerationEndedError(CommunicationError):
    """This process's generation is over: a member was lost or a new round was opened."""


class HostsUpdatedInterrupt(GenerationEndedError):
    """Nobody is lost, but members come or go: raised by a commit, where this rank leaves its generation whole.

    Args:
        text: what changes.
        skip_sync: whether no rank needs another's state. Kept for scripts that read it; here every rank says what it
            holds, and only who lacks something is sent anything.
    """

    def __init__(self, text: str, skip_sync: bool = False) -> None:
        super().__init__(text)
        self.skip_sync = skip_sync
