"""The order in which addresses are tried, and the file of addresses: missing, partial, too large, changed."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from samebits.net.address_book import MAX_FILE_BYTES, SAID_AT_ONCE, AddressBook, addresses_now, read_file
from samebits.scheduler_hosts import NotHostsError

PORT = 8118
A, B, C = (("10.0.0.1", PORT), ("10.0.0.2", PORT), ("10.0.0.3", PORT))


class Read:
    """An address book over a file, and its messages after each read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._is_read = threading.Event()
        self.book = AddressBook(f"file:{path}", PORT, self._is_read.set)

    def again(self, content: str | None = None) -> tuple[bool, str]:
        if content is not None:
            self.path.write_text(content)
        self._is_read.clear()
        self.book.look()
        assert self._is_read.wait(60)
        return self.book.take()


def test_addresses_are_tried_in_turn_and_failed_rounds_slow_down() -> None:
    book = AddressBook("10.0.0.1,10.0.0.2", PORT)
    assert (book.has_choice, book.every) == (True, (A, B))
    seen = []
    for _ in range(9):
        seen.append((book.present, book.slowness(4)))
        book.turn()
    assert [one for one, _ in seen] == [A, B] * 4 + [A]
    assert [slowness for _, slowness in seen] == [1, 1, 2, 2, 4, 4, 4, 4, 4]
    book.stays()
    assert book.slowness(4) == 1


def test_all_refuse_once_each_refused_on_its_last_attempt() -> None:
    book = AddressBook("10.0.0.1,10.0.0.2", PORT)
    said = []
    for refuses in (True, False, True, True, True):
        said.append(book.refuses(f"{len(said)}") if refuses else "-")
        book.turn()
    assert said[:3] == ["", "-", ""], "the second was silent or unreachable"
    assert said[3] == "10.0.0.1:8118: 2; 10.0.0.2:8118: 3"
    assert said[4] == "10.0.0.1:8118: 4; 10.0.0.2:8118: 3"


def test_only_a_few_of_many_refusals_are_quoted() -> None:
    book = AddressBook(",".join(f"10.0.0.{number}" for number in range(1, 7)), PORT)
    for _ in range(5):
        assert book.refuses("no") == ""
        book.turn()
    assert book.refuses("no").endswith("10.0.0.4:8118: no; and 2 more")


def test_refusals_are_forgotten_when_the_file_names_other_addresses(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("10.0.0.1\n10.0.0.2\n")
    read = Read(tmp_path / "hosts")
    assert read.book.refuses("no") == ""
    read.again("10.0.0.2\n10.0.0.1\n")
    assert read.book.present == A
    read.book.turn()
    assert read.book.refuses("no") == ""


def test_single_host_leaves_no_choice() -> None:
    book = AddressBook("10.0.0.1", PORT)
    book.turn()
    assert (book.has_choice, book.present) == (False, A)


def test_file_may_appear_later(tmp_path: Path) -> None:
    read = Read(tmp_path / "hosts")
    assert (read.book.has_choice, read.book.present) == (True, None)
    has_others, text = read.again()
    assert not has_others and "No such file" in text and "Fix: write one host a line" in text
    assert read.again() == (False, ""), "it is reported once"
    read.book.turn()
    assert read.again("10.0.0.1\n") == (True, "")
    assert read.book.present == A


def test_unusable_file_changes_nothing_and_is_reported_once(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("10.0.0.1\n10.0.0.2\n")
    read = Read(tmp_path / "hosts")
    assert read.again() == (False, "")
    for content, why in [("", "it is empty"), ("10.0.0.3\n10.0", "half written"), ("no host\n", "'no host' is no")]:
        has_others, text = read.again(content)
        assert not has_others and why in text and "before are kept" in text
        assert read.again() == (False, "")
        assert read.book.every == (A, B)
    assert read.again("10.0.0.1\n10.0.0.2\n") == (False, "")
    assert "it is empty" in read.again("")[1], "and again after it was usable in between"


def test_current_address_stays_if_the_file_still_lists_it(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("10.0.0.1\n10.0.0.2\n")
    read = Read(tmp_path / "hosts")
    read.book.turn()
    assert read.again("10.0.0.3\n10.0.0.2\n") == (True, f"{read.path} names 10.0.0.3:8118, 10.0.0.2:8118 now")
    assert read.book.present == B
    assert read.again("10.0.0.3\n")[0]
    assert read.book.present == C


def test_file_that_changes_at_each_read_is_read_and_reported_less_often(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("10.0.0.1\n")
    read = Read(tmp_path / "hosts")
    said = 0
    for number in range(2, 66):
        content = "" if number % 2 else f"10.0.0.{number}\n"
        said += bool(read.again(content)[1])
        read.book.turn()
    assert read.book.slowness(8) == 8
    assert said == SAID_AT_ONCE + 3  # the 16th, 32nd and 64th
    read.book.stays()
    assert read.book.slowness(8) == 1
    assert read.again("10.0.0.1\n") == (True, f"{read.path} names 10.0.0.1:8118 now")


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda path: path.write_bytes(b"a\n" * MAX_FILE_BYTES), "more than 65536 bytes"),
        (lambda path: path.mkdir(), "not a plain file"),
        (os.mkfifo, "not a plain file"),  # and no process opens its other end
        (lambda path: path.symlink_to(path), "cannot be read"),
    ],
)
def test_invalid_file_is_refused(make: object, why: str, tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    make(path)  # type: ignore[operator]
    with pytest.raises(NotHostsError, match=why):
        read_file(path, PORT)
    with pytest.raises(NotHostsError, match=rf"{path}, which SCHED_HOST names, is of no use: .*{why}"):
        addresses_now(f"file:{path}", PORT)
