#!/usr/bin/env bash
# Makes .venv beside the repository from constraints.txt: what a job needs and, with --dev, what the tests need.
# VENV=<folder> puts it elsewhere; every script then needs the same VENV. --lock resolves constraints.txt again.
#
# A stamp, written last, lists everything the installation depends on. While it matches there is nothing to do, and no
# process is started to find that out. A mark set before the first change tells the next call that this one was killed
# halfway; that call starts over, because pip takes a half-installed package for a whole one. Only an environment that
# this user made is ever changed or removed.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
. "$root/scripts/venv.sh"
stamp=$venv/.samebits-stamp
unfinished=$venv/.samebits-unfinished
log=$venv/setup.log

say() { printf 'setup: %s\n' "$*"; }
fail() {
    printf 'setup: %s\n' "$*" >&2
    exit 1
}

case ${1-} in
    '' | --dev | --lock) ;;
    -h | --help)
        echo 'usage: setup.sh [--dev]    makes .venv beside the repository; --dev adds what scripts/test.sh needs'
        echo '       setup.sh --lock [--upgrade | --upgrade-package NAME]'
        echo '                           resolves constraints.txt again for every supported Python; needs --dev first'
        exit 0
        ;;
    *) fail "unknown argument '$1': expected nothing, --dev or --lock" ;;
esac

# Prints what has to be locked: every requirement of setup.cfg but torch_npu, which setup.cfg pins itself, and this torch.
requirements() { # TORCH
    "$venv/bin/python" - "$root/setup.cfg" "$1" <<'PYTHON'
import configparser
import sys

parser = configparser.ConfigParser()
parser.read(sys.argv[1], encoding="utf-8")
print(sys.argv[2], parser["options"]["install_requires"], sep="\n")
print(*(lines for extra, lines in parser["options.extras_require"].items() if extra != "npu"), sep="\n")
PYTHON
}

# Resolves constraints.txt for all supported Pythons at once. Versions that still fit stay, unless uv upgrades them.
# torch's version changes only by hand, in its line. What only its CUDA builds need is left to torch, which pins it: with
# a CPU build, `pip install -r constraints.txt` would otherwise download gigabytes that are never used.
lock() { # UV-ARGUMENTS...
    local uv=$venv/bin/uv torch
    new=$root/constraints.txt.new # not local: the trap reads it
    if [ ! -x "$uv" ]; then fail "$uv is missing: call setup.sh --dev first"; fi
    torch=$(grep '^torch==' "$root/constraints.txt")
    trap 'rm -f "$new" "$new.uv"' EXIT
    cp "$root/constraints.txt" "$new.uv" # uv prefers the versions it finds in its output file
    requirements "$torch" | "$uv" pip compile --quiet --universal --python-version 3.11.0 --python "$venv/bin/python" \
        --only-binary :all: --no-header --no-annotate --output-file "$new.uv" "$@" - >/dev/null
    {
        printf '# %s\n' 'The exact versions this repository is tested with, for every Python from 3.11.0 to 3.14.' \
            'Made by `bash scripts/setup.sh --lock`; do not edit it, except for the version of torch.' \
            'Use it with pip or uv: install --constraint constraints.txt ".[dashboard]"'
        grep -Ev "^(nvidia-|cuda-|triton=)|== 'emscripten'" "$new.uv"
    } >"$new"
    mv "$new" "$root/constraints.txt"
}

if [ "${1-}" = --lock ]; then
    shift
    lock "$@"
    exit 0
fi

extras=examples,dashboard
if compgen -G '/dev/davinci[0-9]*' >/dev/null; then extras+=,npu; fi
case ${CHECKPOINT_PATH:-${MS_CHECKPOINT_PATH-}} in
    file://*) ;;
    *://*) extras+=,remote ;;
esac
if [ "${1-}" = --dev ]; then extras+=,dev; fi
# Extras stay installed: run.sh must not remove pytest after a call with --dev.
kept=
if [ -r "$stamp" ]; then { read -r _ && read -r kept; } <"$stamp" || true; fi
for extra in dev remote npu; do
    if [[ ,$kept, = *,$extra,* && ,$extras, != *,$extra,* ]]; then extras+=,$extra; fi
done

# Everything the installation depends on. The two links that make the environment's python name the interpreter.
fingerprint() {
    { printf '%s\n' "$root" && cat "$root"/{setup.cfg,pyproject.toml,constraints.txt} "$venv/pyvenv.cfg"; } | cksum
}

is_done() {
    [ -x "$venv/bin/python" ] && [ -r "$stamp" ] && [ ! -e "$unfinished" ] || return 1
    local stamped_fingerprint stamped_extras
    { read -r stamped_fingerprint && read -r stamped_extras; } <"$stamp" || return 1
    [ "$stamped_fingerprint" = "$(fingerprint)" ] || return 1
    local extra
    for extra in ${extras//,/ }; do
        case $extra,$stamped_extras, in
            "$extra",*"$extra",*) ;;
            remote,*dev,*) ;; # which has all that remote has
            *) return 1 ;;
        esac
    done
}

is_supported() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' >/dev/null 2>&1; }

# Prints a usable interpreter. A name on PATH may be a shim of something not installed, so each is tried.
find_python() {
    local candidates=(python3 python3.11 python3.12 python3.13 python3.14) candidate without_ensurepip=
    if [ -n "${PYTHON-}" ]; then candidates=("$PYTHON"); fi
    for candidate in "${candidates[@]}"; do
        if is_supported "$candidate"; then
            # Debian and Ubuntu put ensurepip, which brings pip into a new environment, into a package of its own.
            if [ -x "$venv/bin/python" ] || "$candidate" -c 'import ensurepip' >/dev/null 2>&1; then
                command -v "$candidate"
                return
            fi
            without_ensurepip=${without_ensurepip:-$candidate}
        fi
    done
    if [ -n "$without_ensurepip" ]; then
        fail "$without_ensurepip has no ensurepip, so it cannot make an environment with pip in it. Fix: apt-get install" \
            "$("$without_ensurepip" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])') (Debian, Ubuntu)," \
            "or name another Python with PYTHON=<its path> bash $0"
    fi
    fail "no Python from 3.11 to 3.14 among ${candidates[*]}: install one, or name it with PYTHON=<its path> bash $0"
}

# stage WHAT COMMAND...: runs the command into the log, says every ten seconds that it still does.
stage() {
    local what=$1 began=$SECONDS status line waited
    shift
    say "$what"
    exec {done_fd}< <(
        status=0
        "$@" >>"$log" 2>&1 </dev/null || status=$?
        echo "$status"
    )
    while :; do
        waited=0
        read -r -t 10 line <&"$done_fd" || waited=$?
        [ "$waited" -gt 128 ] || break # above 128: ten seconds went by without an answer
        say "$what: $((SECONDS - began)) s so far"
    done
    exec {done_fd}<&-
    status=${line:-killed}
    [ "$status" = 0 ] && return
    # pip that failed before it began to install has changed nothing, and what was there may stay.
    if [ "$status" != killed ] && [ -x "$venv/bin/pip" ] && ! grep -q '^Installing collected packages' "$log"; then
        rm -f "$unfinished"
    fi
    tail -n 4 "$log" | sed 's/^/    /' >&2
    fail "$what failed after $((SECONDS - began)) s (exit status $status): all of it is in $log, and where no package index" \
        "can be reached, PIP_FIND_LINKS=<folder with the wheels of constraints.txt> lets the same command work offline"
}

make_environment() {
    "$python" -m venv "$venv" && "$venv/bin/python" -m pip --version
}

install_packages() {
    local pip=("$venv/bin/python" -m pip install --disable-pip-version-check --no-input --constraint constraints.txt)
    cd "$root"
    "${pip[@]}" setuptools wheel && "${pip[@]}" --no-build-isolation --editable ".[$extras]"
}

# Another package of the same name would be imported instead of ours.
check_import_name() {
    (cd / && "$venv/bin/python" -P - "$root") <<'PYTHON'
import importlib.util
import sys
from pathlib import Path

spec = importlib.util.find_spec("samebits")
origin = spec and spec.origin
expected = Path(sys.argv[1], "runtime", "samebits", "__init__.py")
if origin is None or Path(origin).resolve() != expected.resolve():
    sys.exit(f"`import samebits` finds {origin} instead of {expected}: remove that package")
PYTHON
}

# Nothing is changed that another user made, that this one cannot look into, or that is no such environment.
check_is_ours() {
    local owner choices='have that user call setup.sh, or VENV=<a folder of your own> for this and every other script'
    if [ ! -e "$venv" ] && [ ! -L "$venv" ]; then return; fi
    owner=$(stat -c %U "$venv")
    if [ ! -O "$venv" ]; then
        fail "$venv is not ready for $(id -un) (python or packages are missing), and it is $owner's, so it is left alone." \
            "Fix: $choices"
    fi
    if [ ! -d "$venv" ] || [ ! -r "$venv" ] || [ ! -x "$venv" ] || [ ! -w "$venv" ]; then
        fail "$venv is no folder that $(id -un) may read and write, so it is left alone. Fix: see ls -ld $venv, or $choices"
    fi
    if [ ! -e "$unfinished" ] && [ ! -e "$venv/pyvenv.cfg" ] && [ -n "$(ls -A "$venv")" ]; then
        fail "$venv holds something else than a Python environment, so it is left alone. Fix: name an empty folder with" \
            "VENV=<folder>, or move it away"
    fi
}

if is_done; then exit 0; fi

check_is_ours
began=$SECONDS
if [ ! -x "$venv/bin/python" ]; then
    say "the first time torch and what else a job needs are downloaded and installed: 1.2 GB, 40 to 380 s (5 GB and longer with a torch for CUDA)"
fi
python=$(find_python)
exec {lock_fd}<"$root/setup.cfg"
# The lock belongs to the open file, which this shell keeps when the little Python is gone; pip inherits it too, so that
# what a killed setup.sh left running is waited for.
"$python" - "$lock_fd" <<'PYTHON'
import fcntl
import sys

descriptor = int(sys.argv[1])
try:
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print("setup: another setup.sh is at work here, waiting for it", flush=True)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
PYTHON
if is_done; then exit 0; fi
check_is_ours # again: what the other one left

if [ -e "$unfinished" ]; then
    say "an earlier setup was killed in the middle, so $venv is created again"
    rm -rf "$venv"
elif [ -e "$venv" ] && [ ! -x "$venv/bin/python" ]; then
    say "$venv has no working Python, so it is created again"
    rm -rf "$venv"
fi
mkdir -p "$venv" || fail "$venv cannot be made. Fix: VENV=<a folder of your own> for this and every other script"
: >"$unfinished"
rm -f "$stamp"
: >"$log"
if [ ! -x "$venv/bin/python" ]; then
    stage "making $venv with $("$python" --version)" make_environment
fi
if ! is_supported "$venv/bin/python"; then
    rm -f "$unfinished"
    fail "$venv has $("$venv/bin/python" --version), expected 3.11 to 3.14: move it away and call this again"
fi
stage "installing what constraints.txt names [$extras]" install_packages
if ! wrong=$(check_import_name 2>&1); then
    rm -f "$unfinished"
    fail "$wrong, with $venv/bin/python -m pip uninstall samebits"
fi
printf '%s\n%s\n' "$(fingerprint)" "$extras" >"$stamp.new"
mv "$stamp.new" "$stamp"
rm -f "$unfinished"
say "$venv is ready after $((SECONDS - began)) s"
