#!/bin/sh
# Runs one process of the job as the container's own. Where starting it again cannot help (docs/exit-codes.md) the
# container stays, and says so: a StatefulSet would start it again for ever.
child=
trap 'asked=1; [ -z "$child" ] || kill -TERM "$child" 2> /dev/null' TERM
"$@" &
child=$!
[ -z "${asked:-}" ] || kill -TERM "$child" 2> /dev/null # asked before there was a child to tell
wait "$child"
status=$?
while kill -0 "$child" 2> /dev/null; do # a signal ends wait, not what it waits for
    wait "$child"
    status=$?
done
if [ -n "${asked:-}" ]; then
    exit "$status"
fi
case $status in
    0|1|2|64|65|68|69|72|76|78|80|81|82|85|86|87|88|89|91|130|143)
        sleeper=
        trap '[ -z "$sleeper" ] || kill "$sleeper" 2> /dev/null; exit 0' TERM
        echo "keep.sh: ended with status $status; it is not started again. Fix: kubectl logs, then docs/exit-codes.md"
        while :; do
            sleep 3600 &
            sleeper=$!
            wait "$sleeper"
        done
        ;;
esac
exit "$status"
