#!/bin/bash
# A start script after the one in the original's documentation for a job with disaster recovery on one machine: its
# variables in its order, all on one host. MS_NODE_ID=7 leaks from the loop into the scheduler, as it does there.
export MS_WORKER_NUM=8
export MS_SCHED_HOST=127.0.0.1
export MS_SCHED_PORT=$1
export MS_ENABLE_RECOVERY=1
export MS_RECOVERY_PATH=$PWD/recovery
shift

mkdir -p device
for ((i = 0; i < 8; i++)); do
    export MS_ROLE=MS_WORKER
    export MS_NODE_ID=$i
    python "$@" >device/worker_$i.log 2>&1 &
    echo $! >device/worker_$i.pid
done

export MS_ROLE=MS_SCHED
python "$@" >device/scheduler.log 2>&1 &
echo $! >device/scheduler.pid
