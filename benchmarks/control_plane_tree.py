"""A hundred thousand ranks behind a tree: a real scheduler and real inner relays, and simulated hosts below them.

``python -m benchmarks.control_plane --tree 25 --workers 100000`` measures one formation, heartbeats, a killed
scheduler, and the replacement of one rank and of a rack. The floor is the codec: the same frames are unpacked, verified
and answered with the same bytes in this process, without a socket, a decision or a journal. All processes share this
machine, so wall times include the simulated hosts; the scheduler's CPU time does not. Heartbeats are sent at the rate
that ``beat_s`` gives and are reported as the share of a core that one per second and rank would take.
"""

from __future__ import annotations

import shutil
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks import control_plane_trials as trials
from benchmarks.control_plane_stage import GRACE_S, SCHEDULER, Crowds, Scene, cpu_s
from benchmarks.formation import fsync_ms
from benchmarks.processes import Stage
from benchmarks.report import Progress, Report, median, rounded
from benchmarks.workers.control_plane_bare import ADMITTED, GENERATION_STARTED, JOB, ROUND, ROUND_OPENED
from benchmarks.workers.control_plane_crowd import NUMERICS
from samebits import config
from samebits.config import fixed_settings
from samebits.core import messages, records
from samebits.core.messages import PROTOCOL, Activity, Credential, Heartbeat, Holdings, Join, Process, Register
from samebits.core.state import JobState
from samebits.net.channel import RankEnd, relays_key
from samebits.net.relaying import DOWNWARD, RELAY_PREFIX, Carried, Downward, RelayedRanks, RelayWire
from samebits.service.relay import frames_of
from samebits.service.scheduling.loop import seldom_collected
from samebits.store.journal import JOURNAL_FILE, Journal

RANKS_A_HOST = 64
RACK = 72
BEATS_PER_S = 2000  # by all simulated ranks together, which share the machine with the scheduler
NODE_TIMEOUT_S = 300
CODEC_RANKS, CODEC_HOSTS = 4096, 64


@dataclass(frozen=True, slots=True)
class Replaced:
    """Ranks that were lost together and returned as other processes."""

    decided_s: (
        float  # from the report of the closed connections until the losses are durable, without GRACE's reconnect
    )
    formed_s: float  # from the new processes' start until the last rank has its place in the next generation
    cpu_s: float  # the scheduler's, for both


@dataclass(frozen=True, slots=True)
class Tree:
    """One job behind a tree of relays."""

    form_s: float
    form_cpu_s: float
    relays_cpu_s: float
    resident_kib: float
    beat_cpu_s: float  # for one heartbeat
    relays_beat_cpu_s: float
    journal_bytes: int
    snapshot_bytes: int
    load_s: float
    listens_s: float  # from the kill until the next scheduler listens
    first_back_s: float  # until it has answered the first process of simulated hosts completely
    all_back_s: float
    one: Replaced
    rack: Replaced


def run(
    workers: int, inner_relays: int, clients: int, beats_s: float, say: Callable[[str], None], **variables: str
) -> Tree:
    """Measure one job; ``say`` gets each figure once it is known."""
    beat_s = max(1.0, workers / BEATS_PER_S)
    with Stage() as stage:
        scene = Scene(stage, workers, NODE_TIMEOUT=str(NODE_TIMEOUT_S), **variables)
        scene.start_scheduler()
        ports = scene.start_relays(inner_relays)
        relays = [pid for name, pid in stage.pids().items() if name in ports]
        crowds = scene.start_crowds(
            "tree", workers, clients, relays=tuple(ports.values()), ranks_a_host=RANKS_A_HOST, beat_s=beat_s
        )
        before_s = _sum_s(relays)
        form_s, _, form_cpu_s, resident_kib = trials._form(scene, crowds, SCHEDULER)
        say(f"formed in {form_s:.1f} s, {form_cpu_s / workers * 1e6:.0f} µs of the root's CPU for each worker")
        relays_cpu_s = _sum_s(relays) - before_s
        time.sleep(beat_s)  # only repeated heartbeats are measured
        before_s, counted_s = _sum_s(relays), max(beats_s, beat_s)
        beats, _, beats_cpu_s = trials._beat(scene, crowds, SCHEDULER, counted_s)
        say(f"{beats} heartbeats took {beats_cpu_s / max(1, beats) * 1e6:.1f} µs each of the root's CPU")
        relays_beats_s = (_sum_s(relays) - before_s) * counted_s / (counted_s + trials.STEADY_S)
        trials._require(
            crowds.ask("check", "checked") == workers, "a worker has another slot or rank than its name says"
        )
        killed_s = time.monotonic()
        stage.end(SCHEDULER)
        crowds.tell("away")
        crowds.wait_for("away")
        copy = stage.folder / "copy"
        shutil.copytree(stage.folder / "recovery", copy)
        again_s = time.monotonic()
        listens_s = scene.start_scheduler() - again_s
        back_s = sorted(moment.at_s - again_s for moment in crowds.wait_for("resumed", since_s=killed_s))
        say(f"another scheduler listened after {listens_s:.1f} s, and all were back after {back_s[-1]:.1f} s")
        journal_bytes = (copy / JOURNAL_FILE).stat().st_size
        load_s, snapshot_bytes = _load(copy, workers)
        time.sleep(trials.SETTLE_S)
        one = _replace(scene, crowds, 1)
        say(f"one rank lost and replaced: decided in {one.decided_s:.2f} s, formed in {one.formed_s:.1f} s")
        rack = _replace(scene, crowds, RACK)
        return Tree(
            form_s,
            form_cpu_s,
            relays_cpu_s,
            resident_kib,
            beats_cpu_s / max(1, beats),
            relays_beats_s / max(1, beats),
            journal_bytes,
            snapshot_bytes,
            load_s,
            listens_s,
            back_s[0],
            back_s[-1],
            one,
            rack,
        )


def _sum_s(pids: list[int]) -> float:
    return sum(map(cpu_s, pids))


def _load(recovery: Path, workers: int) -> tuple[float, int]:
    """Load a journal as a new scheduler does, and compact it; return the seconds and the bytes of the snapshot."""
    with seldom_collected():
        began_s = time.perf_counter()
        journal, payloads = Journal.open(recovery)
        state = JobState.replay(map(trials._unpacked, payloads))
        load_s = time.perf_counter() - began_s
    trials._require(len(state.by_slot) == workers, "a registration was lost")
    journal.compact([records.SCHEMA.pack(record) for record in state.snapshot()])
    snapshot_bytes = journal.size_bytes
    journal.close()
    return load_s, snapshot_bytes


def _replace(scene: Scene, crowds: Crowds, count: int) -> Replaced:
    pid = scene.stage.pids()[SCHEDULER]
    before_s = cpu_s(pid)
    with trials._Log(scene) as log:
        lost_s = crowds.tell_one(f"lose:{count}")
        decided_s = log.wait_for_losses(count) - lost_s - GRACE_S
    returned_s = crowds.tell_one("return")
    formed_s = crowds.last("formed", since_s=lost_s) - returned_s
    return Replaced(decided_s, formed_s, cpu_s(pid) - before_s)


# ---- the floor


class Codec:
    """The scheduler's end of all messages of a formation, behind one inner relay, without a decision."""

    def __init__(self) -> None:
        self._sent: list[Downward] = []
        self._ranks = RelayedRanks(b"", CODEC_RANKS, lambda _, packed: self._sent.append(DOWNWARD.unpack(packed)))
        self._hosts = [RankEnd(relays_key(b""), f"{RELAY_PREFIX.decode()}{number}") for number in range(CODEC_HOSTS)]
        self._of = {uuid.uuid4().hex: number % CODEC_HOSTS for number in range(CODEC_RANKS)}
        self._ends = {session: RankEnd(b"", session) for session in self._of}
        self._attach()

    def _attach(self) -> None:
        hellos = [(f"{RELAY_PREFIX.decode()}{number}", end.hello) for number, end in enumerate(self._hosts)]
        self._take(self._frames(hellos), {})
        for delivery in [one for frame in self._sent for one in frame.deliveries]:
            number = int(delivery.sessions[0].removeprefix(RELAY_PREFIX.decode()))
            self._hosts[number].welcome(delivery.body)
        self._sent.clear()

    def _frames(self, sealed: list[tuple[str, bytes]]) -> list[bytes]:
        return [RelayWire().pack(frame) for frame in frames_of(sealed, ())]

    def _inside(self, sealed: dict[str, bytes]) -> list[bytes]:
        """Pack messages of ranks into the frames of their hosts, and these into the inner relay's."""
        by_host: dict[int, list[tuple[str, bytes]]] = {}
        for session, message in sealed.items():
            by_host.setdefault(self._of[session], []).append((session, message))
        return self._frames(
            [
                (f"{RELAY_PREFIX.decode()}{number}", self._hosts[number].seal(frame))
                for number, some in by_host.items()
                for frame in self._frames(some)
            ]
        )

    def _take(self, frames: list[bytes], answers: dict[str, bytes], *, unpacks: bool = False) -> float:
        """Process the frames, and answer each rank; return the CPU seconds."""
        began_s = time.process_time()
        for frame in frames:
            for part in self._ranks.take(b"relay-inner", 1, frame):
                assert isinstance(part, Carried)
                if unpacks:
                    messages.SCHEMA.unpack(part.body)
                if (answer := answers.get(part.session)) is not None:
                    self._ranks.add(part.session, answer, answer)
        self._ranks.flush()
        return time.process_time() - began_s

    def _said(self, message: Callable[[str], object]) -> dict[str, bytes]:
        return {session: end.seal(messages.SCHEMA.pack(message(session))) for session, end in self._ends.items()}

    def measure(self) -> tuple[float, float]:
        """Return the CPU seconds for one rank's formation, and for one heartbeat."""
        settings, _ = config.read({"ROLE": "scheduler", "WORKER_NUM": str(CODEC_RANKS)})
        fixed = fixed_settings(settings)

        def sender(session: str) -> Credential:
            return Credential(JOB, "9999", session, 1)

        def register(session: str) -> Register:
            process = Process(f"simulated#{'0' * 16}", 1, 1, "cpu")
            return Register(
                protocol=PROTOCOL, job="", job_name="control_plane", node="9999", session=session, incarnation=0,
                process=process, settings=fixed, standing=None,
            )  # fmt: skip

        def beat(session: str) -> Heartbeat:
            return Heartbeat(sender(session), 1, Activity.TRAINING, 1, ROUND, step=1)

        def join(session: str) -> Join:
            return Join(sender(session), ROUND, Holdings((), own_parts=False, numerics=NUMERICS, blob=b""))

        took_s = self._take(self._inside({session: end.hello for session, end in self._ends.items()}), {})
        for frame in self._sent:
            for delivery in frame.deliveries:
                for one in DOWNWARD.unpack(delivery.body).deliveries:
                    self._ends[one.sessions[0]].welcome(one.body)
        every = list(self._of)
        took_s += self._take(self._inside(self._said(register)), dict.fromkeys(every, ADMITTED), unpacks=True)
        took_s += self._take(self._inside(self._said(beat)), dict.fromkeys(every, ROUND_OPENED), unpacks=True)
        places = {session: bytes(bytearray(GENERATION_STARTED)) for session in every}  # each rank's own message
        took_s += self._take(self._inside(self._said(join)), places, unpacks=True)
        took_s += self._take(self._inside(self._said(beat)), {}, unpacks=True)
        beat_s = min(self._take(self._inside(self._said(beat)), {}) for _ in range(3))
        return took_s / CODEC_RANKS, beat_s / CODEC_RANKS


# ---- the report


def measure(sizes: list[int], inner_relays: int, clients: int, beats_s: float, **variables: str) -> Report:
    """Measure one job of each size."""
    progress = Progress(f"{', '.join(map(str, sizes))} workers behind {inner_relays} inner relays")
    floor_form_s, floor_beat_s = Codec().measure()
    floor: dict[str, dict[str, float]] = {}
    ours: dict[str, dict[str, float]] = {}
    ratios: dict[str, dict[str, float]] = {}
    for workers in sizes:
        found, size = run(workers, inner_relays, clients, beats_s, progress.say, **variables), str(workers)
        floor[size] = {
            "codec_form_s": rounded(floor_form_s * workers),
            "codec_heartbeats_cpu_s_per_s": rounded(floor_beat_s * workers),
        }
        ours[size] = {
            "form_s": rounded(found.form_s),
            "root_form_cpu_s": rounded(found.form_cpu_s),
            "root_cpu_us_per_registration": rounded(found.form_cpu_s / workers * 1e6),
            "relays_form_cpu_s": rounded(found.relays_cpu_s),
            "root_kib": rounded(found.resident_kib),
            "root_heartbeats_cpu_s_per_s": rounded(found.beat_cpu_s * workers),
            "relays_heartbeats_cpu_s_per_s": rounded(found.relays_beat_cpu_s * workers),
            "failover_listens_s": rounded(found.listens_s),
            "failover_journal_load_s": rounded(found.load_s),
            "failover_first_back_s": rounded(found.first_back_s),
            "failover_all_back_s": rounded(found.all_back_s),
            "one_decided_ms": rounded(found.one.decided_s * 1e3),
            "one_formed_s": rounded(found.one.formed_s),
            "one_root_cpu_s": rounded(found.one.cpu_s),
            "rack_decided_s": rounded(found.rack.decided_s),
            "rack_formed_s": rounded(found.rack.formed_s),
            "rack_root_cpu_s": rounded(found.rack.cpu_s),
            "journal_bytes": found.journal_bytes,
            "snapshot_bytes": found.snapshot_bytes,
            "inner_relays_count": inner_relays,
            "hosts_count": -(-workers // RANKS_A_HOST),
        }
        ratios[size] = {
            "form_vs_codec": rounded(found.form_s / (floor_form_s * workers)),
            "root_form_cpu_vs_codec": rounded(found.form_cpu_s / (floor_form_s * workers)),
            "heartbeats_vs_codec": rounded(found.beat_cpu_s / floor_beat_s),
        }
    return Report(
        "control_plane",
        {"fsync_ms": median(fsync_ms()), "by_workers": floor},
        {},
        {"by_workers": ours},
        {"by_workers": ratios},
    )
