"""All errors of SameBits, each with the exit status of a process that does not catch it.

::

    SameBitsError                     1   base class; never raised itself
    ├── SettingsError                64   an environment variable is missing or wrong
    ├── FencedError                  65   this process was replaced while it was unreachable
    ├── DuplicateNodeError           66   another live process holds this NODE_ID
    ├── SchedulerUnreachableError    67   no scheduler answered for TOPO_TIMEOUT
    ├── RefusedError                 68   other job, other settings, unknown protocol, no seat
    ├── NumericsError                69   this process would compute different bits than the group
    ├── FormationTimeoutError        70   a round waited TOPO_TIMEOUT for its members
    ├── StoreError                   71   data on disk cannot be used as it is
    │   ├── ClaimRemovedError        71   RECOVERY_PATH, or the scheduler's claim in it, was removed
    │   ├── JournalDamagedError      71   a record in the middle of the journal was changed
    │   ├── ForeignFolderError       72   the folder belongs to another job
    │   ├── LockedError              73   another live process writes there
    │   ├── CheckpointError          74   one point cannot be used: torn, flipped, incomplete
    │   └── PointsLostError          94   every copy of the job's restore points is gone
    ├── ListenError                  75   the scheduler's address cannot be listened on
    ├── JobFailedError               76   a death ended the job (ENABLE_RECOVERY=0)
    ├── JobInterruptedError          77   the job stopped unfinished; samebits recover resumes it
    ├── JobStoppedError              78   the user stopped the job
    ├── StuckError                   79   this process could not leave a blocked collective
    ├── UsageError                   80   the runtime's calls are in an order that cannot work
    │   ├── AnomalyError             80   a reported loss is not a number, or far from recent ones (LOSS_ANOMALY=stop)
    │   └── KeyValueError            80   a call of samebits.kv was refused
    │       └── KeyValueTimeoutError 90   a call of samebits.kv was not answered in time
    ├── ProtocolError                81   bytes from a peer that are not a message (counted, never fatal)
    ├── LayoutError                  82   a model's gradient buckets differ from the restore point's
    ├── SchedulerLeftError           84   the scheduler was ended by SIGTERM; its job continues
    ├── SecretError                  85   this process and the scheduler do not share one CLUSTER_SECRET
    ├── DivergenceError              86   a repeated step differs from its record in the step log
    ├── ScriptFailedError            87   errors of the script ended its workers; samebits recover resumes it once fixed
    ├── UntrainedError               88   the script ended without training in the job
    ├── UnequalError                 89   the ranks' states differ; the job does not count as finished
    ├── SupersededError              91   another scheduler has claimed the job; this one has stopped
    ├── LevelsSpentError             92   a process used up its restarts; restart the whole job
    ├── PreflightError               93   this host's device, memory or disk does not work correctly
    ├── HiddenStateError             95   a step repeated from one commit had a different result (HIDDEN_STATE=stop)
    ├── AbortHungError               96   aborting a broken group's communicators did not return
    ├── DeviceLostError              97   after a break, this process could no longer use its device
    └── CommunicationError           83   the group lost a member; recovery handles it inside ``elastic.run``
        └── GenerationEndedError     83   this process's generation is over; ``elastic.run`` re-enters
            └── HostsUpdatedInterrupt 83  the members are about to change; ``elastic.run`` re-enters

Every message names the variable or file, the value found, the value expected, and the command that fixes it.
"""

from __future__ import annotations

from typing import ClassVar

WRONG_WORDS = 2
"""Exit code for wrong arguments on a command line, as in argparse; wrong variables give that of SettingsError."""


OWN_CODES = range(64, 100)
"""The exit codes of this package's errors; a process that ends with one has printed its cause and a fix."""


class SameBitsError(Exception):
    """Base class of all errors of this package; ``exit_code`` is the exit status if it is not caught."""

    exit_code: ClassVar[int] = 1


class SettingsError(SameBitsError):
    """One or more environment variables are wrong; the message lists each on a line."""

    exit_code = 64

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class FencedError(SameBitsError):
    """The scheduler seated another process under this node id; this process must not affect the job again."""

    exit_code = 65

    def __init__(self, text: str, *, may_return: bool = False) -> None:
        super().__init__(text)
        self.may_return = may_return  # another node has its slot, but its node id is free, so it may return as a spare


class DuplicateNodeError(SameBitsError):
    """A live process holds this node id and did not leave within TOPO_TIMEOUT."""

    exit_code = 66


class SchedulerUnreachableError(SameBitsError):
    """A process that is not training did not reach a scheduler within TOPO_TIMEOUT."""

    exit_code = 67


class RefusedError(SameBitsError):
    """The scheduler will never admit this process; the message shows the values of both sides."""

    exit_code = 68


class NumericsError(SameBitsError):
    """Threads, torch version, device type or deterministic flags differ from those at the start of the job."""

    exit_code = 69


class FormationTimeoutError(SameBitsError):
    """A round waited for members longer than TOPO_TIMEOUT; the message names the missing members."""

    exit_code = 70


class StoreError(SameBitsError):
    """Data on disk cannot be used as it is; nothing was changed or deleted."""

    exit_code = 71
    may_pass = False
    """Whether the same call may succeed later, for example once the disk is no longer full."""


class ClaimRemovedError(StoreError):
    """RECOVERY_PATH, or the scheduler's claim in it, was removed, and no other scheduler has claimed the job."""


class JournalDamagedError(StoreError):
    """A record before the last one in the journal fails its checksum."""


class ForeignFolderError(StoreError):
    """A journal, checkpoint or log folder belongs to another job, or was moved while its job was followed."""

    exit_code = 72


class LockedError(StoreError):
    """Another live process holds the lock; the message names the process."""

    exit_code = 73


class CheckpointError(StoreError):
    """A restore point cannot be used; the message names the point and the reason."""

    exit_code = 74


class PointsLostError(StoreError):
    """The journal has a restore point, but no memory, copy or disk does; the message lists the searched places."""

    exit_code = 94


class ListenError(SameBitsError):
    """SCHED_HOST:SCHED_PORT cannot be listened on; the message names the process that holds it, if known.

    Args:
        is_taken: another process listens there, so another port may work.
    """

    exit_code = 75

    def __init__(self, message: str, *, is_taken: bool = False) -> None:
        super().__init__(message)
        self.is_taken = is_taken


class JobFailedError(SameBitsError):
    """A process died with ENABLE_RECOVERY=0, so the job ended; the message is the first cause."""

    exit_code = 76


class JobInterruptedError(SameBitsError):
    """No worker is left and the job is not finished; its journal and checkpoints are intact."""

    exit_code = 77


class JobStoppedError(SameBitsError):
    """The user ended the job; ``samebits recover`` resumes it from its newest checkpoint."""

    exit_code = 78


class SchedulerLeftError(SameBitsError):
    """The scheduler was ended by SIGTERM; the job continues, and another scheduler may take over."""

    exit_code = 84


class SupersededError(SameBitsError):
    """Another scheduler has claimed a later term in RECOVERY_PATH; the job continues with that scheduler."""

    exit_code = 91


class SecretError(SameBitsError):
    """CLUSTER_SECRET of the scheduler and of this process differ, or only one of them has a secret."""

    exit_code = 85


class StuckError(SameBitsError):
    """A collective did not end after its sockets were shut down; the process gives up its seat."""

    exit_code = 79


class UsageError(SameBitsError):
    """A call of this package is not possible at this point; the message names the right call."""

    exit_code = 80


class KeyValueError(UsageError):
    """A call of ``samebits.kv`` was refused because it exceeds a bound or because the value is invalid."""


class KeyValueTimeoutError(KeyValueError, TimeoutError):
    """A call of ``samebits.kv`` was not answered in time; its change may or may not have been made."""

    exit_code = 90


class AnomalyError(UsageError):
    """A reported loss or gradient norm is not plausible, and LOSS_ANOMALY=stop is set."""


class ProtocolError(SameBitsError):
    """The received bytes are not a message of this protocol; the sender is refused and counted."""

    exit_code = 81


class LayoutError(SameBitsError):
    """Gradient buckets differ between ranks or from the restore point, so training would diverge silently."""

    exit_code = 82


class DivergenceError(SameBitsError):
    """A step repeated after a recovery differs from the step log; the message describes the difference."""

    exit_code = 86


class ScriptFailedError(SameBitsError):
    """No worker is left, most ended because of script errors; the message has the first error and its line."""

    exit_code = 87


class UnequalError(SameBitsError):
    """Parameters, moments, steps, positions or audited gradients differ between ranks; the message has details."""

    exit_code = 89


class UntrainedError(SameBitsError):
    """The script ended without training in the job: ``samebits.elastic.run`` was not called, or did not return."""

    exit_code = 88


class LevelsSpentError(SameBitsError):
    """All retries that RECOVER_STRATEGY allows at the lower levels failed; the whole job must be restarted."""

    exit_code = 92


class PreflightError(SameBitsError):
    """The device, memory or disk of this host does not work correctly (HEALTH=preflight); the process takes no seat."""

    exit_code = 93


class HiddenStateError(SameBitsError):
    """A step repeated from the same commit had a different result, or a value changed that no recovery restores."""

    exit_code = 95


class AbortHungError(SameBitsError):
    """Aborting the communicators of a broken group did not return in time; the process gives up its seat."""

    exit_code = 96


class DeviceLostError(SameBitsError):
    """After a break, this process could no longer allocate, compute or copy on its device; it gives up its seat."""

    exit_code = 97


class CommunicationError(SameBitsError):
    """A collective failed because a member of the group is gone."""

    exit_code = 83


class GenerationEndedError(CommunicationError):
    """This process's generation has ended: a member was lost or a new round was opened."""


class HostsUpdatedInterrupt(GenerationEndedError):
    """No member was lost, but members join or leave; a commit raises it, and the rank leaves the generation cleanly.

    Args:
        text: describes the change.
        skip_sync: whether no rank needs the state of another rank. Kept for scripts that read it: every rank reports
            the state that it has, and only ranks without the newest state receive it.
    """

    def __init__(self, text: str, skip_sync: bool = False) -> None:
        super().__init__(text)
        self.skip_sync = skip_sync
