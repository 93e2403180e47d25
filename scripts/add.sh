#!/usr/bin/env bash
# Adds workers of this machine to the job that runs in the current folder, if its world may grow (MAX_WORKER_NUM): they
# are started as run.sh has started the others, and join at the next commit.
#
#   bash scripts/add.sh [N]
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
if [ $# -gt 1 ] || [[ ${1-1} != [1-9]* ]]; then
    echo 'usage: add.sh [N]    in the folder where run.sh was called; adds N workers, by default one' >&2
    [[ $1 == -h || $1 == --help ]] && exit 0
    exit 64
fi

. "$root/scripts/processes.sh"
bash "$root/scripts/setup.sh"

become scale --add "${1-1}"
