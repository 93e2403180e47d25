"""Check, create and join Ascend's rank tables, for ``samebits ranktable``.

The format of RANK_TABLE_FILE (versions 1.0 and 1.2) is documented at hiascend.com, HCCL user guide, "ranktable".
Unknown fields are ignored, and nothing is guessed. By default, only the fields that identify ranks, servers and devices
are required; with *strict*, everything that HCCL requires.
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from samebits.config import is_literal
from samebits.errors import SettingsError
from samebits.named_file import read_named_file

MOST_BYTES = 64 << 20
COMPLETED = "completed"
OF_SUPER_PODS = "1.2"
VERSIONS = ("1.0", OF_SUPER_PODS)
HCCN = Path("/etc/hccn.conf")
_LONGEST_SERVER_ID = 63
_ADDRESS = re.compile(r"^\s*address_([0-9]{1,9})\s*=\s*(\S+)\s*$", re.MULTILINE)
_NUMBER = re.compile(r"[0-9]{1,9}")


class RankTableDevice(msgspec.Struct, frozen=True, omit_defaults=True):
    """One NPU. All values are strings, as in the file."""

    device_id: str
    rank_id: str
    device_ip: str = ""
    super_device_id: str = ""


class RankTableServer(msgspec.Struct, frozen=True, omit_defaults=True):
    """One host with its NPUs."""

    server_id: str
    device: tuple[RankTableDevice, ...]
    host_ip: str = ""


class ServerOfPod(msgspec.Struct, frozen=True):
    """A server's name within a pod."""

    server_id: str


class SuperPod(msgspec.Struct, frozen=True):
    """Servers whose NPUs are directly connected (version 1.2)."""

    super_pod_id: str
    server_list: tuple[ServerOfPod, ...]


class RankTable(msgspec.Struct, frozen=True, omit_defaults=True):
    """A complete rank table."""

    version: str
    server_count: str
    server_list: tuple[RankTableServer, ...]
    status: str = ""
    super_pod_list: tuple[SuperPod, ...] = ()

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return sum(len(server.device) for server in self.server_list)


@dataclass(frozen=True, slots=True)
class CheckedRankTable:
    """A rank table, and the requirements of HCCL that it does not meet."""

    table: RankTable
    lacks: tuple[str, ...]


def parse(text: bytes, name: str, *, strict: bool) -> CheckedRankTable:
    """Parse a rank table.

    Args:
        text: content of the file.
        name: the file's name, for messages.
        strict: also reject tables that HCCL would reject.

    Raises:
        SettingsError: the content is not a valid rank table; the message has one line per fault.
    """
    if len(text) > MOST_BYTES:
        raise SettingsError([f"{name}: more than {MOST_BYTES >> 20} MiB. Fix: name a rank table"])
    try:
        table = msgspec.json.decode(text, type=RankTable)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise SettingsError(
            [f"{name} is not a rank table: {error}. Fix: a JSON object with version, server_count and server_list"]
        ) from None
    faults = list(_faults(table))
    lacks = tuple(_lacks(table))
    if faults or (strict and lacks):
        raise SettingsError([f"{name}: {one}" for one in (*faults, *(lacks if strict else ()))])
    return CheckedRankTable(table, lacks)


def _faults(table: RankTable) -> Iterable[str]:
    """Yield descriptions of ambiguous ranks, servers or devices."""
    if table.version not in VERSIONS:
        yield f"version {table.version!r}: expected {' or '.join(VERSIONS)}. Fix: generate the table again"
    if table.status not in ("", COMPLETED):
        yield f"status {table.status!r}: it is not complete. Fix: wait until it says {COMPLETED!r}"
    if table.server_count != str(len(table.server_list)):
        yield f"server_count {table.server_count!r}, but there are {len(table.server_list)}. Fix: correct the number"
    seen: set[str] = set()
    for server in table.server_list:
        if server.server_id in seen or not 0 < len(server.server_id) <= _LONGEST_SERVER_ID:
            yield (
                f"server_id {server.server_id!r}: expected 1 to {_LONGEST_SERVER_ID} characters, another for each "
                "server. Fix: rename one"
            )
        seen.add(server.server_id)
        ids = Counter(device.device_id for device in server.device)
        wrong = sorted(one for one, count in ids.items() if count > 1 or not _NUMBER.fullmatch(one))
        if wrong:
            yield f"server {server.server_id}: device_id {wrong[0]!r} is named twice, or not a number. Fix: correct it"
    ranks = [device.rank_id for server in table.server_list for device in server.device]
    if sorted(ranks) != sorted(map(str, range(len(ranks)))) or not ranks:
        yield f"the rank_id are not 0 to {max(len(ranks) - 1, 0)}, each once. Fix: number them"


def _lacks(table: RankTable) -> Iterable[str]:
    """Yield descriptions of further HCCL requirements that are not met."""
    if not table.status:
        yield f"status is missing. Fix: add {COMPLETED!r}"
    is_alone = len(table.server_list) == 1
    for server in table.server_list:
        for device in server.device:
            if not is_literal(device.device_ip) and not (is_alone and not device.device_ip):
                yield (
                    f"server {server.server_id}, device {device.device_id}: device_ip {device.device_ip!r} is not an "
                    f"address. Fix: the one that {HCCN} names on that server"
                )
            if table.version == OF_SUPER_PODS and not device.super_device_id:
                yield f"server {server.server_id}, device {device.device_id}: super_device_id is missing. Fix: add it"
    if table.version == OF_SUPER_PODS:
        named = [one.server_id for pod in table.super_pod_list for one in pod.server_list]
        if sorted(named) != sorted(server.server_id for server in table.server_list):
            yield "super_pod_list does not name every server once. Fix: add or remove servers there"


def made(server_id: str, devices: Sequence[int], addresses: dict[int, str], host_ip: str = "") -> RankTable:
    """Create the table of one server, with its devices ranked in this order."""
    entries = tuple(RankTableDevice(str(one), str(rank), addresses.get(one, "")) for rank, one in enumerate(devices))
    return RankTable("1.0", "1", (RankTableServer(server_id, entries, host_ip),), COMPLETED)


def joined(tables: Sequence[RankTable]) -> RankTable:
    """Join the tables of several servers. Ranks are numbered in the given order."""
    servers, first = [], 0
    for table in tables:
        for server in table.server_list:
            by_rank = sorted(server.device, key=lambda one: int(one.rank_id))
            entries = [msgspec.structs.replace(one, rank_id=str(first + at)) for at, one in enumerate(by_rank)]
            servers.append(msgspec.structs.replace(server, device=tuple(entries)))
            first += len(entries)
    pods = tuple(pod for table in tables for pod in table.super_pod_list)
    version = OF_SUPER_PODS if any(table.version == OF_SUPER_PODS for table in tables) else "1.0"
    return RankTable(version, str(len(servers)), tuple(servers), COMPLETED, pods)


def text_of(table: RankTable) -> str:
    """Return the content of the table's file."""
    return json.dumps(msgspec.to_builtins(table), indent=2) + "\n"


def addresses_in(hccn: str) -> dict[int, str]:
    """Return the address of each device in the text of hccn.conf."""
    return {int(number): address for number, address in _ADDRESS.findall(hccn)}


def read(path: Path, *, strict: bool) -> CheckedRankTable:
    """Read the table at this path.

    Raises:
        SettingsError: the file cannot be read, or is not a valid rank table.
    """
    try:
        text = read_named_file(path, MOST_BYTES)
    except OSError as error:
        raise SettingsError([f"{path} cannot be read: {error.strerror}. Fix: name a readable file"]) from None
    return parse(text, str(path), strict=strict)


# ---- the subcommand


def main(arguments: Sequence[str]) -> int:
    """Run the subcommand."""
    parser = argparse.ArgumentParser(
        prog="samebits ranktable",
        description="Check, make and join Ascend's rank tables (RANK_TABLE_FILE).",
        epilog="examples: `samebits ranktable make > a.json` on each server; `samebits ranktable join a.json b.json > "
        "table.json`; `samebits ranktable check table.json --strict`",
    )
    deeds = parser.add_subparsers(dest="deed", required=True, metavar="check | make | join")
    check = deeds.add_parser("check", help="show what a table holds and lacks; status 0 if it is usable")
    check.add_argument("file", type=Path)
    check.add_argument("--strict", action="store_true", help="refuse what HCCL would refuse")
    make = deeds.add_parser("make", help="print the table of this server")
    make.add_argument("--devices", type=_devices, metavar="A-B,C", help="which NPUs, in the order of their ranks")
    make.add_argument("--server-id", default="", help="its name or address (default: this host's name)")
    make.add_argument("--host-ip", default="", help="its own address")
    make.add_argument("--hccn", type=Path, default=HCCN, help="where the NPUs' addresses are (default %(default)s)")
    join = deeds.add_parser("join", help="print one table of several servers")
    join.add_argument("files", type=Path, nargs="+", metavar="FILE")
    options = parser.parse_args(arguments)
    if options.deed == "check":
        return _check(options.file, strict=options.strict)
    if options.deed == "join":
        table = joined([read(path, strict=False).table for path in options.files])
        sys.stdout.write(text_of(parse(text_of(table).encode(), "the joined table", strict=False).table))
        return 0
    sys.stdout.write(text_of(_made_here(options)))
    return 0


def _check(path: Path, *, strict: bool) -> int:
    found = read(path, strict=strict)
    for server in found.table.server_list:
        ranks = ", ".join(f"{one.rank_id} on NPU {one.device_id}" for one in server.device)
        print(f"server {server.server_id}: rank {ranks}")
    print(f"version {found.table.version}, {found.table.world_size} ranks on {len(found.table.server_list)} servers")
    for one in found.lacks:
        print(f"samebits: HCCL would refuse it: {one}", file=sys.stderr)
    return 0


def _made_here(options: argparse.Namespace) -> RankTable:
    try:
        addresses = addresses_in(read_named_file(options.hccn, MOST_BYTES).decode(errors="replace"))
    except FileNotFoundError:
        addresses = {}
    except OSError as error:
        raise SettingsError(
            [f"--hccn {options.hccn} cannot be read: {error.strerror}. Fix: name a readable file"]
        ) from None
    devices = options.devices if options.devices is not None else sorted(addresses)
    if not devices:
        raise SettingsError([f"{options.hccn} names no NPU. Fix: --devices 0-7, or --hccn with the file that does"])
    table = made(options.server_id or socket.gethostname(), devices, addresses, options.host_ip)
    return parse(text_of(table).encode(), "this server's table", strict=False).table


def _devices(text: str) -> list[int]:
    found: list[int] = []
    for part in text.split(","):
        ends = re.fullmatch(r"\s*([0-9]{1,4})(?:-([0-9]{1,4}))?\s*", part)
        if ends is None or int(ends[2] or ends[1]) < int(ends[1]):
            raise argparse.ArgumentTypeError(f"{text!r}: expected numbers and ranges, as in 0-3,6")
        found += range(int(ends[1]), int(ends[2] or ends[1]) + 1)
    return found
