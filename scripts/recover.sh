#!/usr/bin/env bash
# Brings back whatever is dead of the job that was started in the current folder, and only that; then follows it to its
# end. It needs no arguments and no environment: run.sh has kept how the job was started.
#
#   bash scripts/recover.sh
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
if [ $# -gt 0 ]; then
    echo 'usage: recover.sh    in the folder where run.sh was called' >&2
    [[ $1 == -h || $1 == --help ]] && exit 0
    exit 64
fi

bash "$root/scripts/setup.sh"
python=$root/.venv/bin/python
. "$root/scripts/processes.sh"

# What is gone, found by looking at this machine and asking the scheduler or its journal: sets the job's folder and
# environment, $interpreter, $script, $args and the list $gone.
log_dir=$("$python" -P -m runtime recover --log-dir)
lock "$log_dir"
found=$("$python" -P -m runtime recover)
eval "$found"

start_gone() { start_all "${gone[@]}"; }

follow_while start_gone --again bash "$root/scripts/recover.sh"
