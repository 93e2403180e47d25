"""The table of causes: how each observation is classified and what is done about it."""

from __future__ import annotations

import signal

import pytest

from samebits import errors
from samebits.core.causes.restarts import Loss, RestartAt, Restarts, Sort, sort_of
from samebits.core.causes.table import (
    DEFAULT,
    TABLE,
    UNKNOWN,
    CauseClass,
    LossDetection,
    Means,
    Observation,
    Remedy,
    Retry,
    Row,
    Signal,
    chosen,
    judged,
)
from samebits.core.hangs import SILENT_KINDS, Doing, Hang, ProcessState
from samebits.core.messages import GiveUp, ReportEnvelope
from samebits.core.reports import LastWords
from samebits.core.scheduler import Seen
from samebits.core.watch.hang_judge import Cure, cure_of
from samebits.exit_codes import EXIT_CODES
from samebits.exit_codes import Repeatable as ExitAgain
from tests.core.house import House, training_house
from tests.core.test_core_hang_judge import SLEEPS, pass_time, training_for_a_while

OF_A_DEVICE = ("UCE ERROR", "HBM MULTI BIT ECC ERROR", "SUSPECT MEM ERROR")
OF_A_LINK = ("SUSPECT REMOTE ERROR", "HCCS LINK ERROR", "UB LINK ERROR", "HCCL OP RETRY FAILED")
"""The codes are those of torch_npu 2.13.0's libtorch_npu.so."""


def failure(error: str) -> Observation:
    return Observation(1, None, error, is_failure=True)


@pytest.mark.parametrize(
    ("seen", "cause", "retry"),
    [
        (Observation(signal=signal.SIGKILL), CauseClass.NODE, Retry.YES),
        (Observation(status=137), CauseClass.NODE, Retry.YES),
        (Observation(status=143), CauseClass.NODE, Retry.YES),
        (Observation(signal=signal.SIGKILL, is_out_of_memory=True), CauseClass.NODE, Retry.YES),
        (Observation(signal=signal.SIGSEGV), CauseClass.SOFTWARE, Retry.YES),
        (Observation(signal=signal.SIGABRT, error="uncorrectable ECC error encountered"), CauseClass.DEVICE, Retry.YES),
        (failure("RuntimeError: CUDA error: uncorrectable ECC error encountered"), CauseClass.DEVICE, Retry.YES),
        (failure("RuntimeError: CUDA error: device-side assert triggered"), CauseClass.SOFTWARE, Retry.ONCE),
        (failure("torch.OutOfMemoryError: CUDA out of memory"), CauseClass.SOFTWARE, Retry.ONCE),
        (failure("MemoryError"), CauseClass.NODE, Retry.YES),
        (failure("RuntimeError: DefaultCPUAllocator: can't allocate memory"), CauseClass.NODE, Retry.YES),
        (failure("OSError: [Errno 12] Cannot allocate memory"), CauseClass.NODE, Retry.YES),
        (failure("RuntimeError: NPU out of memory. Tried to allocate 2.00 GiB"), CauseClass.SOFTWARE, Retry.ONCE),
        (failure("RuntimeError: FORCE STOP.[ERROR] ERR00100 PTA call acl api failed"), CauseClass.NETWORK, Retry.YES),
        *((failure(f"RuntimeError: {text}."), CauseClass.DEVICE, Retry.YES) for text in OF_A_DEVICE),
        *((failure(f"RuntimeError: {text}."), CauseClass.NETWORK, Retry.YES) for text in OF_A_LINK),
        (failure("OSError: [Errno 28] No space left on device: 'x'"), CauseClass.STORAGE, Retry.YES),
        (Observation(71, None, "x: writing: No space left on device"), CauseClass.STORAGE, Retry.YES),
        (failure("OSError: [Errno 5] Input/output error"), CauseClass.STORAGE, Retry.YES),
        (failure("ConnectionResetError: [Errno 104] Connection reset by peer"), CauseClass.NETWORK, Retry.YES),
        (failure("ConnectionRefusedError: [Errno 111] Connection refused"), CauseClass.SOFTWARE, Retry.ONCE),
        (failure("RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed. "), CauseClass.NODE, Retry.YES),
        (failure("ValueError: loss is NaN"), CauseClass.DATA, Retry.ONCE),
        (failure("PIL.UnidentifiedImageError: cannot identify image file"), CauseClass.DATA, Retry.ONCE),
        (failure("KeyError: 'x'"), CauseClass.SOFTWARE, Retry.ONCE),
        (Observation(errors.SettingsError.exit_code), CauseClass.SOFTWARE, Retry.NO),
        (Observation(errors.StuckError.exit_code), CauseClass.NETWORK, Retry.YES),
        (Observation(errors.PreflightError.exit_code), CauseClass.NODE, Retry.YES),
        (Observation(errors.ScriptFailedError.exit_code), CauseClass.SOFTWARE, Retry.OVER),
        (Observation(status=3), CauseClass.SOFTWARE, Retry.ONCE),
        (Observation(hang=Hang.STUCK), CauseClass.SOFTWARE, Retry.YES),
        (Observation(hang=Hang.SAVING), CauseClass.STORAGE, Retry.YES),
        (Observation(hang=Hang.CUT_OFF), CauseClass.NETWORK, Retry.YES),
        (Observation(notice=LossDetection.GONE), CauseClass.NODE, Retry.YES),
        (Observation(notice=LossDetection.CLOSED), CauseClass.UNKNOWN, Retry.YES),
        (Observation(notice=LossDetection.SILENT), CauseClass.UNKNOWN, Retry.YES),
        (Observation(notice=LossDetection.UNEQUAL), CauseClass.DEVICE, Retry.YES),
        (Observation(), CauseClass.UNKNOWN, Retry.YES),
    ],
)
def test_observation_has_its_class_and_whether_a_retry_helps(
    seen: Observation, cause: CauseClass, retry: Retry
) -> None:
    row = DEFAULT.of(seen)
    assert (row.cause, row.retry) == (cause, retry), row.fault


def test_signals_have_the_systems_numbers() -> None:
    assert {one.value for one in Signal} == {getattr(signal, f"SIG{one.name}") for one in Signal}


def test_only_software_and_data_end_a_job() -> None:
    for row in TABLE:
        if row.retry is not Retry.YES:
            assert row.cause in (CauseClass.SOFTWARE, CauseClass.DATA), row.fault
        if row.retry in (Retry.NO, Retry.OVER):
            assert row.strategies == (Remedy.STOP,), row.fault


def test_every_row_is_reachable_has_a_remedy_and_a_unique_name() -> None:
    assert len({row.fault for row in TABLE}) == len(TABLE)
    for row in TABLE:
        example = Observation(
            status=min(row.statuses, default=None) if row.fault != "it exited with a status of its own" else 3,
            signal=max(row.signals, default=None) if len(row.signals) < 9 else signal.SIGKILL,
            error=row.texts[0] if row.texts else "",
            is_failure=bool(row.is_failure),
            is_out_of_memory=bool(row.is_out_of_memory),
            hang=min(row.hangs, key=str, default=None),
            notice=min(row.notices, key=str, default=None),
        )
        assert DEFAULT.of(example) is row, row.fault
        assert row.fix and row.fix.isprintable() and row.strategies


def test_every_hang_has_one_row_and_a_silent_worker_is_never_asked_to_leave() -> None:
    for hang in set(Hang) - {Hang.SILENT}:
        assert sum(hang in row.hangs for row in TABLE) == 1, hang
    assert all(cure_of(hang) is Cure.NONE for hang in SILENT_KINDS)
    ended = {hang for hang in Hang if cure_of(hang) is Cure.END}
    assert ended == {Hang.STUCK, Hang.BUSY, Hang.LOADING, Hang.COMPILING}
    assert {hang for hang in Hang if cure_of(hang) is Cure.FORM_ANEW} == {Hang.APART, Hang.LINK}


def test_table_agrees_with_the_exit_codes() -> None:
    """A supervisor must not restart forever what an exit code marks as final for a shell's loop."""
    for one in EXIT_CODES:
        retry = DEFAULT.of(Observation(one.code)).retry
        if one.again is ExitAgain.NO and one.code not in (errors.FencedError.exit_code, 81, 130, 143):
            assert retry is not Retry.YES, one
        if one.again is ExitAgain.YES and one.code in (66, 67, 73, 79, 83, 84, 137):
            assert retry is Retry.YES, one


# ---- remedies


ROW = DEFAULT.of(Observation(notice=LossDetection.GONE))


@pytest.mark.parametrize(
    ("means", "strategy", "words"),
    [
        (Means(goes_on=False, spare="on its host"), Remedy.STOP, "the job ends (ENABLE_RECOVERY=0)"),
        (Means(spare="on its host", has_launcher=True), Remedy.SPARE, "a spare on its host takes its place"),
        (Means(has_launcher=True, shrinks_after_s=10.0), Remedy.RESTART, "a new process takes its place"),
        (Means(shrinks_after_s=10.0), Remedy.SHRINK, "the others continue without it after 10 s (shrink in GRACE)"),
        (Means(), Remedy.WAIT, "the others wait for it"),
    ],
)
def test_first_available_strategy_is_followed(means: Means, strategy: Remedy, words: str) -> None:
    assert chosen(ROW, means) == (strategy, words)


@pytest.mark.parametrize("error", ["KeyError: 1", "ValueError: loss is nan"])
def test_repeated_script_error_ends_the_job_under_a_supervisor(error: str) -> None:
    row = DEFAULT.of(failure(error))
    assert chosen(row, Means(has_launcher=True))[1] == "the same twice at one step ends the job"
    assert chosen(row, Means()) == (Remedy.WAIT, "the others wait for it")


def test_strategy_without_an_actor_becomes_a_wait() -> None:
    row = Row("x", CauseClass.DEVICE, Retry.YES, (Remedy.SPARE, Remedy.DRAIN), "y")
    assert chosen(row, Means()) == (Remedy.WAIT, "the others wait for it")
    assert judged(UNKNOWN, Means(spare="on another host")) == "cause unknown; a spare on another host takes its place"


# ---- users of the table


@pytest.mark.parametrize("seen", [Observation(status=status) for status in (None, *range(256))])
def test_kills_and_external_causes_never_end_a_job(seen: Observation) -> None:
    if sort_of(seen) is not Sort.OUTSIDE:
        return
    budget = Restarts(32767)
    assert all(isinstance(budget.died("2", Loss(Sort.OUTSIDE), float(at)), RestartAt) for at in range(50))


def causes_of(house: House) -> str:
    return house.core.first_cause


def test_first_cause_gives_class_and_remedy_and_keeps_both() -> None:
    house = training_house(3)
    house.close("s1", gone=True)
    assert causes_of(house).endswith("its process is gone (node fault; the others wait for it)")
    house.crash(1.0)
    assert causes_of(house).endswith("its process is gone (node fault; the others wait for it)")


def test_with_a_launcher_another_process_takes_its_place() -> None:
    house = training_house(2, token=b"t" * 32)
    house.close("s1", gone=True)
    assert causes_of(house).endswith("(node fault; a new process takes its place)")
    house = training_house(2, token=b"t" * 32, restarts=False)  # MAX_RESTARTS=0
    house.close("s1", gone=True)
    assert causes_of(house).endswith("(node fault; the others wait for it)")


@pytest.mark.parametrize(
    ("words", "judgement"),
    [
        ("ValueError: loss is nan", "data fault; the others wait for it"),
        ("KeyError: 'x'", "software fault; the others wait for it"),
        ("RuntimeError: CUDA error: uncorrectable ECC error", "device fault; the others wait for it"),
        ("OSError: [Errno 28] No space left on device", "storage fault; the others wait for it"),
    ],
)
def test_last_words_are_classified(words: str, judgement: str) -> None:
    house = training_house(2)
    house.receive("s1", ReportEnvelope(house.credential("1"), LastWords(words), step=41))
    house.close("s1", gone=True)
    assert causes_of(house).endswith(f"{words} ({judgement})")


def test_silent_worker_is_unknown_and_a_stopped_one_is_not() -> None:
    for process_state, judgement in (
        (None, "cause unknown"),
        (ProcessState(Doing.STOPPED), "node fault"),
        (ProcessState(Doing.RUNS, 0.1), "network fault"),
    ):
        house = training_house(2)
        house.now += 6.0
        house.beat("0")
        if process_state is not None:
            house.step(Seen("s1", process_state))
        house.tick()
        assert f"({judgement}; the others wait for it)" in causes_of(house)


def test_worker_ordered_to_give_up_is_classified_by_its_hang() -> None:
    house = training_for_a_while(step_timeout_s=6.0)
    pass_time(house, 13, n2=SLEEPS)
    (why,) = [one.text for sent in house.sent.values() for one in sent if isinstance(one, GiveUp)]
    house.leave("2", on_purpose=False, text=why)
    assert "(HANG=end) (software fault; the others wait for it)" in causes_of(house)


def test_job_with_full_disks_everywhere_is_interrupted_not_failed() -> None:
    house = training_house()
    for node in "10":
        house.say_last(node, "OSError: [Errno 28] No space left on device")
        house.leave(node, on_purpose=False, text="OSError")
    house.tick()
    house.tick(10.0)
    assert house.ended is not None and house.ended.kind.name == "INTERRUPTED"
