#!/usr/bin/env bash
# Starts a job on this machine: WORKER_NUM workers and SPARE_NUM spares, then the scheduler; every process runs what the
# environment says.
#
#   bash scripts/run.sh [--fresh] [--detach] [script.py [args...]]
#
# Without a script it trains examples/digits/train.py. Whatever the environment already says is kept.
# Below the current folder: device/ (logs, pid files), recovery/ (the scheduler's journal), ckpt_of_rank/ (checkpoints).
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
fresh= detach=
while [ $# -gt 0 ]; do
    case $1 in
        --fresh) fresh=--fresh ;;
        --detach) detach=--detach ;;
        -h | --help)
            echo 'usage: run.sh [--fresh] [--detach] [script.py [args...]]'
            echo '  --fresh   moves the folders of an unfinished job aside and starts anew'
            echo '  --detach  starts the job and returns at once'
            exit 0
            ;;
        --) shift && break ;;
        -*) echo "run.sh: unknown option '$1': expected --fresh, --detach or a script" >&2 && exit 64 ;;
        *) break ;;
    esac
    shift
done

script=${1:-examples/digits/train.py}
if [ $# -gt 0 ]; then shift; fi
if [ ! -f "$script" ]; then
    if [ ! -f "$root/$script" ]; then
        echo "run.sh: there is no script '$script' in $PWD or $root: name one, as in run.sh train.py --epochs 3" >&2
        exit 64
    fi
    script=$root/$script
fi

. "$root/scripts/processes.sh"
bash "$root/scripts/setup.sh"

# default NAME VALUE: what is exported unless the user has set it, also with MindSpore's prefix.
default() {
    local prefixed=MS_$1
    if [ -z "${!1-}${!prefixed-}" ]; then export "$1=$2"; fi
}

# How many accelerators a job here may use, without importing torch.
accelerators() {
    local devices=() device count visible=${CUDA_VISIBLE_DEVICES-${ASCEND_RT_VISIBLE_DEVICES-all}}
    mapfile -t devices < <(compgen -G '/dev/nvidia[0-9]*' || compgen -G '/dev/davinci[0-9]*')
    count=${#devices[@]}
    if [ "$count" -gt 0 ] && [ "$visible" != all ]; then
        count=0
        IFS=, read -r -a devices <<<"$visible"
        for device in "${devices[@]}"; do # up to the first that names none, such as -1 or NoDevFiles, as CUDA takes them
            if ! [[ $device =~ ^[[:space:]]*([0-9]|GPU-|MIG-) ]]; then break; fi
            count=$((count + 1))
        done
    fi
    if [ "${DEVICE:-${MS_DEVICE-}}" = cpu ]; then count=0; fi
    echo "$count"
}

found=$(accelerators)
spares=${SPARE_NUM:-${MS_SPARE_NUM:-0}}
if [[ $spares =~ ^[0-9]{1,6}$ ]]; then found=$((found - 10#$spares)); fi # a spare needs a device of its own
default WORKER_NUM "$((found > 0 ? found : 4))"
default ENABLE_RECOVERY 1
default JOB_NAME "${script##*/}"
if [ "${WORKER_NUM:-${MS_WORKER_NUM-}}" != 1 ]; then default OMP_NUM_THREADS 1; fi

become run $fresh $detach -- "$script" "$@"
