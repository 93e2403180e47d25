"""Messages, records and notices of a scenario, each as one plain line.

A line has what a decision depends on and omits what the lines around it show. Free text is shown where its reader sees
it: in the scheduler's log or at the worker.
"""

from __future__ import annotations

from collections.abc import Iterable

from samebits.core.agent.agent_events import (
    AgentNotice,
    BreakGroup,
    LeaveGently,
    MustEnd,
    Over,
    SchedulerAway,
    SchedulerBack,
    ToldToWait,
    Waits,
)
from samebits.core.messages import (
    PROTOCOL,
    AddressMap,
    Admitted,
    EndJob,
    Explain,
    Fenced,
    Finished,
    FromScheduler,
    FromWorker,
    GenerationStarted,
    Heartbeat,
    Join,
    Leave,
    Pending,
    Publish,
    Refused,
    Register,
    ReportEnvelope,
    RoundOpened,
    Status,
    StopAt,
)
from samebits.core.point import Point
from samebits.core.records import (
    CauseFound,
    GenerationCommitted,
    JobCreated,
    JobFinished,
    JobInterrupted,
    JobRebuilt,
    Record,
    SeatGranted,
    SeatLeft,
    SeatLost,
    SeatQuiet,
    SeatResumed,
    SeatRetired,
    SlotGiven,
    SpareAdmitted,
    StopPlanned,
    TermStarted,
    TrainingFinished,
)
from samebits.core.reports import Digests, LastWords, PeerGone, StopsAfter


def seconds(value: float) -> str:
    """Format seconds as ``30`` or ``0.5``."""
    return f"{round(value, 3):g}"


def report_line(message: FromWorker) -> str:
    """Describe a message of a worker."""
    match message:
        case Register():
            return _register_line(message)
        case Heartbeat():
            place = f", generation {message.generation}, step {message.step}" if message.generation else ""
            return f"Heartbeat {message.activity.name}{place}"
        case Join():
            return f"Join {message.round}, holds {_each(message.holdings.points) or 'no point'}"
        case Publish():
            return f"Publish its address for generation {message.generation}"
        case ReportEnvelope(body=Digests(digests)):
            return f"Digests of {_each(tuple(digest.point for digest in digests))}"
        case ReportEnvelope(body=LastWords(text)):
            return f"LastWords {text!r}"
        case Leave():
            return f"Leave {'on purpose' if message.on_purpose else 'by failure'}: {message.text}"
        case ReportEnvelope(body=PeerGone(session)):
            return f"PeerGone {session}"
        case ReportEnvelope(body=StopsAfter(commits, is_there)):
            return f"StopsAfter commit {commits}" + (", and waits there" if is_there else "")


def _register_line(message: Register) -> str:
    words = ["Register"]
    if message.incarnation:
        words.append(f"as incarnation {message.incarnation} of {message.job}")
    if message.standing is not None:
        words.append(f"was in generation {message.standing.generation}")
    if message.protocol != PROTOCOL:
        words.append(f"protocol {message.protocol}")
    return ", ".join(words)


def order_line(message: FromScheduler) -> str:
    """Describe a message of the scheduler."""
    match message:
        case Admitted():
            over = f", finished at {message.finished}" if message.finished else ""
            seat = "as a spare" if message.slot is None else f"to slot {message.slot}"
            return f"Admitted {seat}, incarnation {message.incarnation}, term {message.term}{over}"
        case Pending():
            return f"Pending, {message.registered} of {message.world_size}"
        case Refused():
            wait = f"retry after {seconds(message.retry_after_s)} s" if message.retry_after_s else "waiting cannot help"
            return f"Refused {message.refusal.name}, {wait}"
        case Fenced():
            return f"Fenced, incarnation {message.incarnation}"
        case RoundOpened():
            return _opened_line(message)
        case GenerationStarted():
            return _started_line(message)
        case Explain():
            return f"Explain {message.point}"
        case AddressMap():
            return f"AddressMap of generation {message.generation}"
        case Finished():
            return f"Finished at {message.point}"
        case StopAt():
            return f"StopAt commit {message.commits}" if message.commits else "StopAt a commit that it is to name"
        case EndJob():
            return f"EndJob {message.kind.name}"
        case Status():
            return "Status"


def _opened_line(message: RoundOpened) -> str:
    line, place = f"RoundOpened {message.round}", message.place
    if message.gently:
        line += ", gently"
    if place is not None and place.rank != place.slot:
        line += f", slot {place.slot} would be rank {place.rank} of {place.world_size}"
    return line + (f", missing {message.missing}" if message.missing else "")


def _started_line(message: GenerationStarted) -> str:
    line = f"GenerationStarted {message.generation}, rank {message.rank} of {message.world_size}"
    if message.source != message.rank:
        line += f", is sent the point by rank {message.source}"
    if message.serves:
        line += f", sends the point to rank {_each(message.serves)}"
    return line


def record_line(record: Record) -> str:
    """Describe a record of the journal."""
    match record:
        case JobCreated():
            return f"JobCreated {record.job}, {record.name!r}"
        case TermStarted():
            return f"TermStarted {record.term}"
        case SeatGranted():
            return f"SeatGranted to worker {record.node}: slot {record.slot}, incarnation {record.incarnation}"
        case SeatResumed() | SeatLeft():
            return f"{type(record).__name__} by worker {record.node}, incarnation {record.incarnation}"
        case SeatLost():
            return f"SeatLost by worker {record.node}, incarnation {record.incarnation}, since {seconds(record.since)}"
        case CauseFound():
            return f"CauseFound: rank {record.rank} of generation {record.generation}, worker {record.node}"
        case SeatQuiet():
            return f"SeatQuiet of worker {record.node} since {seconds(record.since)}"
        case SeatRetired():
            return f"SeatRetired: worker {record.node} has slot {record.slot} no more"
        case SpareAdmitted():
            return f"SpareAdmitted: worker {record.node}, incarnation {record.incarnation}"
        case SlotGiven():
            return f"SlotGiven to worker {record.node}: slot {record.slot}"
        case GenerationCommitted():
            return _committed_line(record)
        case JobRebuilt():
            seats = _each(f"{seat.node}.{seat.incarnation}" for seat in record.seats)
            return f"JobRebuilt {record.job}, term {record.term}, seats {seats}, {_committed_line(record.generation)}"
        case TrainingFinished():
            return f"TrainingFinished at {record.point}"
        case JobInterrupted():
            return f"JobInterrupted {record.kind.name} at step {record.step}"
        case StopPlanned():
            return f"StopPlanned after commit {record.commits}" if record.commits else "StopPlanned"
        case JobFinished():
            return "JobFinished"


def _committed_line(record: GenerationCommitted) -> str:
    members = " ".join(f"{node}.{incarnation}" for node, incarnation in record.members)
    start = record.restore or "the initial state"
    gaps = "" if record.slots == tuple(range(len(record.slots))) else f" in slots {_each(record.slots)}"
    return f"GenerationCommitted {record.generation} by round {record.round}: {members}{gaps}, from {start}"


def notice_line(notice: AgentNotice) -> str | None:
    """Describe a notice to the worker's user; None for notices that only concern the process."""
    match notice:
        case ToldToWait():
            return f"waits {seconds(notice.retry_after_s)} s: {notice.text}" if notice.retry_after_s else notice.text
        case BreakGroup():
            return f"leaves its group: {notice.text}"
        case LeaveGently():
            return f"is to leave its group at its next commit: {notice.text}"
        case Waits():
            return f"waits in the rendezvous: {notice.text}"
        case MustEnd():
            return f"must end ({notice.reason.label.replace('_', ' ')}): {notice.text}"
        case SchedulerAway():
            return "the scheduler is unreachable"
        case SchedulerBack():
            return f"the scheduler is reachable again after {seconds(notice.away_s)} s, term {notice.term}"
        case Over():
            return f"elastic.run returns, {notice.point}"
        case _:
            return None


def _each(values: Iterable[Point | int | str]) -> str:
    return ", ".join(map(str, values))
