"""Target: the bytes of a journal file, whatever happened to them.

The first byte of an input selects what the rest is: raw bytes of a file; batches of any content in a file with a valid
signature; or a sequence of changes to a good journal. Changed content is never read as something else: the reader
returns complete batches from the start, at least up to the first change, or an error.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator

import xxhash

from samebits.store import journal_format
from samebits.store.journal_format import BATCH_HEAD_BYTES, FILE_HEAD_BYTES, JournalFormatError, JournalPayloads
from tests.fuzz.draws import Draws

NONCE = 0x0123456789ABCDEF
BORN = [b"first", b"", b"third" * 9]
BATCHES = [[b"a" * 20, b"bb"], [b""], [], [b"\xf5SBb" * 8, b"c" * 33], [b"last" * 5]]
MOST_CHANGES = 4


def _journal() -> tuple[bytes, list[int], list[list[bytes]]]:
    """Return a good journal, the offsets at which its batches end, and its content up to each of them."""
    data = journal_format.encode_file(BORN, NONCE)
    ends, held = [len(data)], [list(BORN)]
    for batch in BATCHES:
        data += journal_format.encode_batch(batch, NONCE, len(data))
        ends.append(len(data))
        held.append(held[-1] + batch)
    return data, ends, held


WHOLE, ENDS, HELD = _journal()


def check(data: bytes) -> None:
    kinds = (_check_raw, _check_signed, _check_changed)
    kinds[data[0] % len(kinds) if data else 0](data[1:])


def decode(data: bytes) -> JournalPayloads | None:
    """Read a file and check the promises that hold for every file; None if it is refused."""
    try:
        contents = journal_format.decode_file(data)
    except JournalFormatError as error:
        assert 0 <= error.offset <= len(data)
        assert error.found
        return None
    assert FILE_HEAD_BYTES <= contents.end <= len(data)
    assert (contents.torn is None) == (contents.end == len(data))
    assert contents.born_bytes <= contents.end, "a file that was renamed into place complete is never cut"
    cut = journal_format.decode_file(data[: contents.end])
    assert cut == JournalPayloads(contents.nonce, contents.born_bytes, contents.payloads, contents.end, None)
    return contents


def _check_raw(data: bytes) -> None:
    decode(data)


def _check_signed(data: bytes) -> None:
    """Check heads of any content with a right checksum, which a reader that trusts checksums would accept."""
    draws = Draws(data)
    file = bytearray(journal_format.encode_file([], NONCE))
    while not draws.is_used_up:
        seed = (NONCE + len(file)) % 2**64
        count, size = draws.below(2**32), draws.below(2**32)
        body = draws.take(draws.below(256))
        if draws.below(2):
            size = len(body)
        if draws.below(2):
            count %= 1 + len(body) // 4
        head = struct.pack("<4sIIQ", b"\xf5SBb", count, size, xxhash.xxh3_64_intdigest(body, seed))
        file += head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head, seed)) + body
    contents = decode(bytes(file))
    if contents is not None:
        batches = (contents.end - FILE_HEAD_BYTES) // BATCH_HEAD_BYTES
        assert sum(map(len, contents.payloads)) <= len(file)
        assert batches or not contents.payloads


def _check_changed(data: bytes) -> None:
    changed = change(data)
    contents = decode(changed)
    if contents is None:
        return
    same = next((at for at, (a, b) in enumerate(zip(WHOLE, changed, strict=False)) if a != b), None)
    if same is None:
        same = min(len(WHOLE), len(changed))
    assert contents.payloads in HELD, f"read what was never written: {contents.payloads}"
    sure = sum(1 for end in ENDS if end <= same)
    assert sure >= 1
    assert contents.payloads in HELD[sure - 1 :], (
        f"{same} bytes are unchanged, and complete batches of them are missing"
    )
    later = [start for start in ENDS[:-1] if start > contents.end and _has_head(changed, start)]
    assert not later, f"cut at {contents.end} as if torn there, though a later append is at {later}"


def _has_head(changed: bytes, start: int) -> bool:
    head = slice(start, start + BATCH_HEAD_BYTES)
    return changed[head] == WHOLE[head]


def change(data: bytes) -> bytes:
    """Return the good journal after up to four changes that the input selects."""
    draws = Draws(data)
    file = bytearray(WHOLE)
    for _ in range(1 + draws.below(MOST_CHANGES)):
        at = draws.below(len(file) + 1)
        end = min(len(file), at + draws.below(64))
        match draws.below(6):
            case 0:
                file[at : at + 1] = bytes(byte ^ (1 << draws.below(8)) for byte in file[at : at + 1])
            case 1:
                del file[at:]
            case 2:
                del file[at:end]
            case 3:
                file[at:at] = draws.take(draws.below(64))
            case 4:
                file[at:end] = bytes(end - at)
            case _:
                source = draws.below(len(WHOLE))
                file[at:end] = WHOLE[source : source + end - at]
    return bytes(file)


def seeds() -> Iterator[bytes]:
    yield b"\0" + WHOLE
    for first, last in itertools.pairwise([FILE_HEAD_BYTES, *ENDS]):
        yield b"\0" + WHOLE[: (first + last) // 2]
    yield b"\1" + struct.pack("<IIB", 2, 12, 12) + struct.pack("<II", 1, 3) + b"abcd" + b"\1\1"
    for kind in range(6):
        yield b"\2" + struct.pack("<BHBBB", 0, ENDS[2] + 5, 9, kind, 7)
