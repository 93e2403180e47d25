# Sourced by run.sh, recover.sh and add.sh: how a process of a job is started, and that only one of them does so at a time.

# A Ctrl-C ends the script, also where the command that it met takes no notice.
trap 'exit 130' INT
trap 'exit 143' TERM

# One script that starts processes at a time: held until `unlock`, or until the script is gone.
lock() { # LOG_DIR
    mkdir -p "$1"
    exec {start_lock}>>"$1/start.lock"
    if ! flock --nonblock "$start_lock"; then
        echo "samebits: another run.sh or recover.sh is starting processes here, waiting for it" >&2
        flock "$start_lock"
    fi
}

unlock() { exec {start_lock}>&-; }

# The process gets a session of its own, so that no terminal's Ctrl-C or hang-up reaches it; its output is appended to
# LOG_DIR/NAME.log, and LOG_DIR/NAME.pid says which process it is: its pid, then its start time (proc(5), field 22).
# This shell is not its parent: how it ends is for the follower, who adopts it, to learn.
start() { # NAME COMMAND...
    local name=$1 pid stat
    local pid_file=$log_dir/$name.pid
    shift
    pid=$(setsid "$@" </dev/null >>"$log_dir/$name.log" 2>&1 {start_lock}>&- & echo "$!")
    read -r stat 2>/dev/null <"/proc/$pid/stat" || stat= # it is gone already, as its follower will tell
    set -- ${stat##*) }
    if ! { printf '%s %s\n' "$pid" "${20-0}" >"$pid_file.new" && mv "$pid_file.new" "$pid_file"; }; then
        kill "$pid" # nobody would know of it
        return 1
    fi
}

# Starts these processes of the job whose folder, environment, $interpreter, $script and $args are set.
start_all() { # NAMES
    local name
    for name in "$@"; do
        if [ "$name" = scheduler ]; then
            export ROLE=scheduler
            unset NODE_ID
            start "$name" "$interpreter" -P -m runtime scheduler
        else
            export ROLE=worker NODE_ID=${name#worker_}
            start "$name" "$interpreter" "$script" "${args[@]}"
        fi
    done
}

# Whoever starts processes is not cut off half-way by the terminal.
heed_no_terminal() { trap '' INT HUP; }

# Becomes the follower, who lets FUNCTION start processes, aside, as soon as he listens to signals. So no Ctrl-C is lost:
# one that comes before ends this shell with nothing started, one that comes later ends what was.
follow_while() { # FUNCTION FOLLOWER'S-ARGUMENTS...
    local starting=$1 blocked=()
    shift
    exec {go}> >(heed_no_terminal && trap : TERM && read -r _ && "$starting" </dev/null)
    set -- --starter "$!" --go "$go" "$@"
    unlock # FUNCTION holds it, too
    if env --block-signal=INT true 2>/dev/null; then blocked=(env --block-signal=INT,TERM); fi # no traceback of Python's
    exec "${blocked[@]}" "$python" -P -m runtime follow "$@"
}

# What a start script of today's shell leaks would name the wrong process.
unset MS_ROLE MS_NODE_ID
