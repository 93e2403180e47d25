#!/usr/bin/env bash
# Sets itself up and runs the checks: ruff, mypy, then pytest. --help describes --quick and --all.
# With pytest's own arguments, only pytest runs:
#   bash scripts/test.sh tests/core -k cool_down
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
how=default
case ${1-} in
    -h | --help)
        cat <<'USAGE'
usage: test.sh [--quick | --all]
       test.sh PYTEST-ARGUMENTS...
  without arguments: ruff, mypy and the tests; what every change waits for
  --quick  a minute, at every edit: ruff, mypy, the core's tests and stories, 500 simulated schedules, one kill
  --all    everything, for a release: what shows once more what another test shows (marked "thorough"), too
  with a path or another argument of pytest's: only pytest, with these, "thorough" or not
USAGE
        exit 0
        ;;
    --quick | --all)
        how=${1#--}
        if [ $# -gt 1 ]; then
            echo "test.sh: $1 stands alone, found '${*:2}' after it. Fix: leave one of both out" >&2
            exit 64
        fi
        ;;
    ?*) how=pytest ;;
esac

. "$root/scripts/venv.sh" # before the folder is left that a relative VENV starts from
bash "$root/scripts/setup.sh" --dev
cd "$root"
bin=$venv/bin

# stage WHAT COMMAND...: runs the command and prints its duration; the first failure ends the script.
stage() {
    local what=$1 began=$SECONDS status=0
    shift
    "$@" || status=$?
    if [ "$status" != 0 ]; then
        printf 'test: %s failed (exit status %s) after %s s: %s\n' "$what" "$status" "$((SECONDS - began))" "$*" >&2
        exit "$status"
    fi
    printf 'test: %s passed in %s s\n' "$what" "$((SECONDS - began))"
}

# Otherwise every process of a job compiles the package again if PYTHONDONTWRITEBYTECODE is set, as in containers.
"$bin/python" -m compileall -q runtime tests benchmarks examples

if [ "$how" = pytest ]; then
    exec "$bin/python" -m pytest "$@"
fi
stage 'ruff check' "$bin/ruff" check .
stage 'ruff format' "$bin/ruff" format --check .
stage mypy "$bin/mypy" --strict runtime
many=(-n 3 --dist worksteal) # most tests wait for processes more than they compute
[ "$how" = quick ] || "$bin/python" -m tests.rewritten # once, not in each of the three processes
case $how in
    quick)
        stage 'the core' "$bin/python" -m pytest -q -n 2 tests/core
        stage 'simulation' "$bin/python" -m tests.simulation --seeds 500 --jobs 2
        stage 'one kill' "$bin/python" -m pytest -q 'tests/system/test_kill_list.py::test_kill_changes_no_bit[rank 0]'
        ;;
    all) stage 'all tests' "$bin/python" -m pytest "${many[@]}" ;;
    default) exec "$bin/python" -m pytest "${many[@]}" -m 'not thorough' ;;
esac
