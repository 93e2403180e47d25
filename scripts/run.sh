#!/usr/bin/env bash
# Starts a job on this machine, as `samebits run` does, with the Python of the repository's .venv: WORKER_NUM workers and
# SPARE_NUM spares, then the scheduler; every process runs what the environment says.
#
#   bash scripts/run.sh [options] [script.py [args...]]
#
# Without a script it trains examples/digits/train.py. Whatever the environment already says is kept. What died is started
# again by hand, unless MAX_RESTARTS says otherwise.
# Below the current folder: device/ (logs, pid files), recovery/ (the scheduler's journal), ckpt_of_rank/ (checkpoints).
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
options=()
while [ $# -gt 0 ]; do
    case $1 in
        --fresh | --detach | --json | --dry-run | --plain) options+=("$1") ;;
        -h | --help)
            echo 'usage: run.sh [--fresh] [--detach] [--json] [--dry-run] [--plain] [script.py [args...]]'
            echo '  --fresh    moves the folders of an unfinished job aside and starts over'
            echo '  --detach   starts the job and returns at once'
            echo '  --json     a JSON object a line instead of text'
            echo '  --dry-run  says what would start where, and starts nothing'
            echo '  --plain    for a script that is not ported: restarted as a whole after a death'
            exit 0
            ;;
        --) shift && break ;;
        -*) echo "run.sh: unknown option '$1'. Fix: take one that run.sh --help names; a script's own stand after the script, and the number of workers is WORKER_NUM" >&2 && exit 64 ;;
        *) break ;;
    esac
    shift
done

script=${1:-examples/digits/train.py}
if [ $# -gt 0 ]; then shift; fi
if [ ! -f "$script" ]; then
    if [ ! -f "$root/$script" ]; then
        echo "run.sh: there is no script '$script' in $PWD or $root. Fix: name one, as in run.sh train.py --epochs 3" >&2
        exit 64
    fi
    script=$root/$script
fi

. "$root/scripts/processes.sh"
bash "$root/scripts/setup.sh"

if [ -z "${MAX_RESTARTS-}${MS_MAX_RESTARTS-}" ]; then export MAX_RESTARTS=0; fi
if [ -z "${SPARE_NUM-}${MS_SPARE_NUM-}" ]; then export SPARE_NUM=0; fi
become run ${options[@]+"${options[@]}"} -- "$script" "$@"
