# Sourced by run.sh, recover.sh and add.sh: how a process of a job is started, and that only one of them does so at a time.

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
start() { # NAME COMMAND...
    local name=$1 stat
    local pid_file=$log_dir/$name.pid
    shift
    setsid "$@" </dev/null >>"$log_dir/$name.log" 2>&1 {start_lock}>&- &
    read -r stat 2>/dev/null <"/proc/$!/stat" || stat= # it is gone already, as its follower will tell
    set -- ${stat##*) }
    printf '%s %s\n' "$!" "${20-0}" >"$pid_file.new"
    mv "$pid_file.new" "$pid_file" || [ ! -e "$pid_file.new" ] || mv "$pid_file.new" "$pid_file" # Ctrl-C may hit mv, too
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

# From here on a Ctrl-C must end what was started, too: it is handed on to the follower.
hold_signals() { trap 'interrupted=--end' INT TERM; }

# Becomes the follower. Where env can block signals, one that comes while Python starts waits until it listens.
follow() { # ARGUMENTS...
    local held=()
    if env --block-signal=INT true 2>/dev/null; then held=(env --default-signal=INT,TERM --block-signal=INT,TERM); fi
    trap '' INT TERM
    exec "${held[@]}" "$python" -P -m runtime follow ${interrupted-} "$@"
}

# What a start script of today's shell leaks would name the wrong process.
unset MS_ROLE MS_NODE_ID
