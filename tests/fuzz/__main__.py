"""``python -m tests.fuzz --target decoder|journal|manifest|settings (--runs N | --seconds S | --reproduce FILE)``.

Needs the extra ``fuzz`` (atheris). Prints libFuzzer's progress, and finally the number of executions, their rate and,
for a defect, the file of the input and the command that reproduces it.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz.targets import TARGETS

LONGEST_INPUT_BYTES = 4096
MOST_MEMORY_MIB = 2048
LONGEST_RUN_S = 10  # for one input; longer is a hang

_PROGRESS = re.compile(r"#(\d+)\s+(\w+)\s+cov: (\d+).*?corp: (\d+).*?exec/s: (\d+)")
_EXECUTIONS = re.compile(r"stat::number_of_executed_units:\s*(\d+)")


def parse_arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--target", choices=TARGETS, required=True)
    until = parser.add_mutually_exclusive_group(required=True)
    until.add_argument("--runs", type=int, help="end after this many executions")
    until.add_argument("--seconds", type=int, help="end after this time")
    until.add_argument("--reproduce", type=Path, metavar="FILE", help="run the target once on this input; no atheris")
    parser.add_argument("--seed", type=int, default=1, help="of libFuzzer's random choices (default 1)")
    parser.add_argument(
        "--corpus", type=Path, help="folder of inputs to begin with and to add to (default: thrown away)"
    )
    parser.add_argument("--crashes", type=Path, default=Path("fuzz_crashes"), help="where a crash file goes")
    return parser.parse_args(words)


def run_campaign(arguments: argparse.Namespace, folder: Path) -> int:
    """Run libFuzzer to its end; return 0 if it found nothing."""
    corpus = (arguments.corpus or folder / "corpus").resolve()
    seeds, found_here = folder / "seeds", folder / "found"
    for each in (corpus, seeds, found_here):
        each.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(TARGETS[arguments.target].seeds()):
        (seeds / f"seed-{number}").write_bytes(seed)
    command = [
        *(sys.executable, "-m", "tests.fuzz.campaign", arguments.target),
        f"-runs={arguments.runs}" if arguments.runs is not None else f"-max_total_time={arguments.seconds}",
        f"-seed={arguments.seed}",
        f"-max_len={LONGEST_INPUT_BYTES}",
        f"-rss_limit_mb={MOST_MEMORY_MIB}",
        f"-timeout={LONGEST_RUN_S}",
        f"-artifact_prefix={found_here}/{arguments.target}-",
        "-print_final_stats=1",
        *(str(corpus), str(seeds)),
    ]
    began_s = time.monotonic()
    executions, told = 0, []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as run:
        assert run.stdout is not None
        for line in run.stdout:
            told = [*told[-60:], line]
            if (found := _PROGRESS.search(line)) and (found[2] == "pulse" or sys.stdout.isatty()):
                end = "\r" if sys.stdout.isatty() else "\n"
                print(
                    f"{found[1]:>12} executions, {found[5]}/s, coverage {found[3]}, corpus {found[4]}",
                    end=end,
                    flush=True,
                )
            elif found := _EXECUTIONS.search(line):
                executions = int(found[1])
    wall_s = time.monotonic() - began_s
    rate = f"{executions} executions in {wall_s:.1f} s, {executions / wall_s:.0f}/s"
    print(f"\n{arguments.target}: {rate}, seed {arguments.seed}")
    if run.returncode == 0:
        return 0
    print("".join(told))
    for crash_file in found_here.iterdir():
        arguments.crashes.mkdir(parents=True, exist_ok=True)
        kept = shutil.copy(crash_file, arguments.crashes)
        print(f"defect: python -m tests.fuzz --target {arguments.target} --reproduce {kept}")
    return 1


def main(words: list[str]) -> int:
    arguments = parse_arguments(words)
    if arguments.reproduce is not None:
        TARGETS[arguments.target].check(arguments.reproduce.read_bytes())
        print(f"{arguments.target}: {arguments.reproduce} shows no defect")
        return 0
    if importlib.util.find_spec("atheris") is None:
        print(
            "campaigns need atheris: .venv/bin/python -m pip install -c constraints.txt -e '.[fuzz]'", file=sys.stderr
        )
        return 2
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        return run_campaign(arguments, Path(folder))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
