"""Listening beyond loopback needs a secret or explicit consent, and a secret is never shown."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from samebits import config
from samebits.config import is_loopback, kept_environment, read, require_secret, secret_environment
from samebits.errors import SettingsError
from samebits.net.curve import LEAST_SECRET_BYTES
from samebits.settings_table import VARIABLES

SCHEDULER = {"ROLE": "scheduler", "WORKER_NUM": "4"}
WORKER = {"ROLE": "worker", "WORKER_NUM": "4", "NODE_ID": "0"}
SECRET = "correct-horse-battery-staple"


@pytest.mark.parametrize("address", ["127.0.0.1", "127.8.9.1", "::1", "::ffff:127.0.0.1", "localhost", "LocalHost."])
def test_loopback(address: str) -> None:
    assert is_loopback(address)
    assert read({**SCHEDULER, "SCHED_HOST": address})[0].sched_host
    require_secret([address], read(SCHEDULER)[0])


@pytest.mark.parametrize("name", ["SCHED_HOST", "SCHED_BIND", "MS_SCHED_HOST"])
@pytest.mark.parametrize("address", ["10.0.0.1", "0.0.0.0", "::", "[fd00::1]", "::ffff:10.0.0.1"])
def test_scheduler_beyond_loopback_is_refused_with_all_three_alternatives(name: str, address: str) -> None:
    with pytest.raises(SettingsError) as caught:
        read({**SCHEDULER, name: address})
    (problem,) = caught.value.problems
    assert problem.startswith(f"{name}={address}: ")
    for way_out in ("CLUSTER_SECRET ", "CLUSTER_SECRET_FILE", "export CLUSTER_INSECURE=1"):
        assert way_out in problem
    assert read({**SCHEDULER, name: address, "CLUSTER_INSECURE": "1"})[0].cluster_insecure


def test_sched_bind_decides_if_it_is_set() -> None:
    assert read({**SCHEDULER, "SCHED_HOST": "10.0.0.1", "SCHED_BIND": "127.0.0.1"})[0].sched_host == "10.0.0.1"


def test_only_the_scheduler_listens() -> None:
    assert read({**WORKER, "SCHED_HOST": "10.0.0.1"})[1] == []
    assert read({"SCHED_HOST": "10.0.0.1"}, role_required=False)[1] == []


def test_resolved_address_is_judged_by_the_process_that_binds() -> None:
    settings, _ = read({**SCHEDULER, "SCHED_HOST": "head.cluster"})
    require_secret(["127.0.0.1", "::1"], settings)
    require_secret([], settings)
    with pytest.raises(SettingsError) as caught:
        require_secret(["127.0.0.1", "10.0.0.5", "fd00::5"], settings)
    (problem,) = caught.value.problems
    assert problem.startswith("SCHED_HOST=head.cluster (listening on 10.0.0.5, fd00::5): ")
    assert "CLUSTER_INSECURE=1" in problem
    with pytest.raises(SettingsError, match=r"^SCHED_BIND=any\.cluster \(listening on 10\.0\.0\.5\)"):
        require_secret(["10.0.0.5"], read({**SCHEDULER, "SCHED_BIND": "any.cluster"})[0])
    require_secret(["10.0.0.5"], read({**SCHEDULER, "CLUSTER_INSECURE": "1"})[0])


@pytest.mark.parametrize("given_as", [{"CLUSTER_SECRET": SECRET}, {"CLUSTER_SECRET_FILE": "/run/secret"}])
def test_secret_allows_other_addresses(given_as: dict[str, str]) -> None:
    settings, _ = read({**SCHEDULER, "SCHED_HOST": "10.0.0.1", **given_as})
    require_secret(["10.0.0.1"], settings)


def test_secret_is_in_no_repr_and_no_warning() -> None:
    settings, warnings = read({**WORKER, "CLUSTER_SECRET": SECRET, "MS_CLUSTER_SECRET": SECRET + "2"})
    assert settings.cluster_secret == SECRET
    assert SECRET not in f"{settings} {settings!r} {warnings}"
    (warning,) = warnings
    assert "CLUSTER_SECRET=(hidden) is used; MS_CLUSTER_SECRET=(hidden) differs" in warning


def test_secret_is_found_for_a_process_and_never_saved_for_another() -> None:
    environ = {"CLUSTER_SECRET": SECRET, "MS_CLUSTER_SECRET": SECRET, "CLUSTER_SECRET_FILE": "/run/secret", "ROLE": "x"}
    assert secret_environment(environ) == {"CLUSTER_SECRET": SECRET, "MS_CLUSTER_SECRET": SECRET}
    assert secret_environment({"CLUSTER_SECRET": ""}) == {}
    assert kept_environment(environ) == {"CLUSTER_SECRET_FILE": "/run/secret"}


def test_table_states_the_minimum_length_of_a_secret() -> None:
    rows = [row for row in config.environment_table().splitlines() if row.startswith("| `CLUSTER_SECRET` |")]
    assert len(rows) == 1
    assert f"{LEAST_SECRET_BYTES} bytes" in rows[0]


SURPRISING = ["0", "1", "-1", "4", "99999", "nan", "1e400", "30s", "tcp://10.0.0.1:8118", "[::1]", "::", "%", "{name}"]
TEXTS = st.one_of(
    st.sampled_from([*SURPRISING, "worker", "scheduler", "MS_SCHED", "10.0.0.1", ".", "~", "localhost"]),
    st.text(max_size=40),
    st.text(alphabet="0123456789.:-+eE_[]% ", max_size=12),
)
BASES = st.sampled_from([{}, WORKER, SCHEDULER])
NAMES = st.sampled_from([prefix + variable.name for variable in VARIABLES for prefix in ("", "MS_")])


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@example(environ={}, secrets={}, role_required=False)
@example(environ=WORKER, secrets={}, role_required=True)
@given(
    environ=st.builds(lambda base, odd: {**base, **odd}, BASES, st.dictionaries(NAMES, TEXTS, max_size=8)),
    secrets=st.dictionaries(
        st.sampled_from(["CLUSTER_SECRET", "MS_CLUSTER_SECRET"]), st.sampled_from([f"⟦{SECRET}⟧", f"{SECRET}\n⟧"])
    ),
    role_required=st.booleans(),
)
def test_any_environment_gives_settings_or_a_settings_error_without_the_secret(
    environ: dict[str, str], secrets: dict[str, str], role_required: bool
) -> None:
    environ = {**environ, **secrets}
    before = dict(environ)
    try:
        given_settings, warnings = read(environ, role_required=role_required)
    except SettingsError as error:
        said = f"{error} {error!r} {error.__context__!r} {error.__cause__!r}"
        assert error.problems
        assert all(problem and "\n" not in problem and "Fix: " in problem for problem in error.problems)
    else:
        said = f"{given_settings} {given_settings!r} {warnings}"
        assert given_settings.role is not None or not role_required
        assert given_settings.min_worker_num <= given_settings.worker_num <= given_settings.max_worker_num
        assert 2 * given_settings.heartbeat_interval_s <= given_settings.node_timeout_s <= given_settings.topo_timeout_s
        assert given_settings.cluster_secret in (None, environ.get("CLUSTER_SECRET"), environ.get("MS_CLUSTER_SECRET"))
    assert SECRET not in said
    assert environ == before
