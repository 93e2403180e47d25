#!/usr/bin/env bash
# Brings back whatever is dead of the job that was started in the current folder, and only that; then follows it to its
# end. It needs no arguments and no environment: run.sh has kept how the job was started.
#
#   bash scripts/recover.sh [--detach | --moved | --from-checkpoints]
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
case ${1-} in
    '' | --detach | --moved | --from-checkpoints) ;;
    *)
        echo 'usage: recover.sh [--detach | --moved | --from-checkpoints]    in the folder where run.sh was called' >&2
        echo '  --detach            exit once the processes are started, and leave the job running' >&2
        echo '  --moved             this folder was moved: continue its job here' >&2
        echo '  --from-checkpoints  the journal is lost and nothing runs: a new one, from the newest point all ranks hold' >&2
        [[ $1 == -h || $1 == --help ]] && exit 0
        exit 64
        ;;
esac

. "$root/scripts/processes.sh"
bash "$root/scripts/setup.sh"

become recover "$@"
