#!/usr/bin/env bash
# Sets itself up and runs every check: ruff, mypy, then pytest. With arguments only pytest runs, and gets them:
#   bash scripts/test.sh tests/core -k cool_down
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
bash "$root/scripts/setup.sh" --dev
cd "$root"
bin=$root/.venv/bin

# stage WHAT COMMAND...: runs the command and says how long it took; the first that fails ends the script.
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

if [ $# -eq 0 ]; then
    stage 'ruff check' "$bin/ruff" check .
    stage 'ruff format' "$bin/ruff" format --check .
    stage mypy "$bin/mypy" --strict runtime
    set -- -n 3 --dist worksteal  # most tests wait for processes more than they compute
fi
exec "$bin/python" -m pytest "$@"
