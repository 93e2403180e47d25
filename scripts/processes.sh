# Sourced by run.sh, recover.sh and add.sh: how a script becomes the Python that does the work.

. "$root/scripts/venv.sh"
python=$venv/bin/python

# A Ctrl-C ends the script, also where the command that it met takes no notice.
trap 'exit 130' INT
trap 'exit 143' TERM

# Becomes `samebits WORDS...`. A Ctrl-C is held back until Python listens: nothing runs yet, and no traceback is shown.
become() { # WORDS...
    local blocked=()
    if env --block-signal=INT true 2>/dev/null; then blocked=(env --block-signal=INT,TERM); fi
    exec "${blocked[@]}" "$python" -P -m samebits "$@"
}
