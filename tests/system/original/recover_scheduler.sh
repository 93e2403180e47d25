#!/bin/bash
# The original's recovery command: the scheduler again, in the same environment, under the name its documentation uses.
export MS_WORKER_NUM=8
export MS_SCHED_HOST=127.0.0.1
export MS_SCHED_PORT=$1
export MS_ENABLE_RECOVERY=1
export MS_RECOVERY_PATH=$PWD/recovery
shift

export MS_ROLE=MS_SCHED
export MS_NODE_ID=sched
python "$@" >>device/scheduler.log 2>&1 &
echo $! >device/scheduler.pid
