"""List, read, upload and remove objects in one folder of an object store, through fsspec.

All calls to fsspec are in this file. It knows neither points nor formats. A failure is either permanent
(credentials, a missing bucket, an invalid request) and raised at once, or it may be temporary (network, an overloaded
server) and is retried for a bounded time. Either way the error is one sentence that gives the URL, the operation and
the fix, but no credentials.

s3fs reads an object until the server stops sending, and lists a folder for as long as the server names a next page. The
functions at the end of this file bound both. They rely on internals of s3fs and aiobotocore: ``_lsdir`` with
``max_items``, ``_call_s3`` and its ``Body``, the session class, and that a response keeps its body in ``_content``.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import importlib.util
import re
import secrets
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, TypeVar

from samebits.errors import CheckpointError, StoreError
from samebits.printable import counted, shortened
from samebits.urls import without_credentials, words_without_credentials

Value = TypeVar("Value")

PATIENCE_S = 60.0
"""Seconds for which temporary failures are retried, in addition to the protocol library's own retries."""

_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 5.0
_PIECE_BYTES = 8 * 1024 * 1024
_PART_BYTES = 32 * 1024 * 1024
_MOST_PARTS = 9_000  # S3 accepts 10,000 parts per object
_BUCKET_SCHEMES = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "obs", "cos"})
_FINAL_NUMBERS = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENAMETOOLONG, errno.EMSGSIZE, errno.EPERM})

_CREDENTIALS_MEND = (
    "give this process credentials that may list, read, write and delete there (for s3: AWS_ACCESS_KEY_ID and "
    "AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or an instance's role), and check that its clock is right"
)
_NETWORK_MEND = (
    "check that the server answers from this host (name, port, proxy, firewall; for s3: AWS_ENDPOINT_URL) and start "
    "again; saved data is intact"
)
_OTHER_MEND = "check the server's answer and CHECKPOINT_PATH; saved data is intact"


class ObjectStore:
    """One folder of an object store. Names are relative to it; ``/`` separates levels.

    Args:
        url: such as ``s3://bucket/folder``.
        patience_s: how long temporary failures are retried.

    Raises:
        StoreError: fsspec, or the package it needs for this scheme, is not installed, or the URL is invalid.
    """

    def __init__(self, url: str, *, patience_s: float = PATIENCE_S) -> None:
        self.url = without_credentials(url).rstrip("/")
        self._scheme = url.partition("://")[0].lower()
        self._patience_s = patience_s
        self._given_url = url
        if importlib.util.find_spec("fsspec") is None:
            raise self._not_installed("no module named fsspec")

    @functools.cached_property
    def _opened(self) -> tuple[Any, str]:
        """Return the file system and the folder's path in it.

        They are opened on first use, because the import takes a second.
        """
        try:
            from fsspec.core import url_to_fs

            files, path = url_to_fs(self._given_url)
        except ImportError as error:
            raise self._not_installed(str(error)) from None
        except Exception as error:
            raise StoreError(f"{self.url}: {self._clean(error)}; {_OTHER_MEND}") from error
        if _is_s3(files):
            files.config_kwargs = {"http_session_cls": bounded_session(), **files.config_kwargs}
        return files, str(path).rstrip("/")

    @property
    def _files(self) -> Any:
        return self._opened[0]

    @property
    def _root(self) -> str:
        return self._opened[1]

    def _not_installed(self, found: str) -> StoreError:
        return StoreError(
            f"{self.url}: the package for {self._scheme}:// is not installed ({found}): `pip install samebits[remote]` "
            "adds s3://, `samebits[hdfs]` adds hdfs://; another scheme needs the package that fsspec names for it"
        )

    def where(self, name: str) -> str:
        """Return the name's URL, for messages."""
        return f"{self.url}/{name}" if name else self.url

    def folders(self) -> list[str]:
        """Return the names of the folders directly below this one."""
        return [entry for entry, kind, _ in self._list("") if kind == "directory"]

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the objects directly below a folder and their sizes in bytes; empty if it does not exist."""
        return {entry: size for entry, kind, size in self._list(folder) if kind == "file"}

    def read(self, name: str, most_bytes: int) -> bytes | None:
        """Return at most ``most_bytes`` of a small object; None if it does not exist."""

        def call() -> bytes | None:
            try:
                return _content(self._files, self._path(name), [(0, most_bytes)])[0][:most_bytes]
            except FileNotFoundError:
                self._require_bucket()
                return None
            except OSError as error:
                if error.errno == errno.EINVAL and self._files.info(self._path(name))["size"] == 0:
                    return b""  # S3 has no range in an empty object
                raise

        return self._trying(name, "reading", call)

    def read_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of each (start, end) range; requests run in parallel if the library can.

        Raises:
            CheckpointError: the object is gone, or ends too early.
        """
        path, ends = self._path(name), [end for _, end in ranges]

        def call() -> list[bytes]:
            try:
                if self._scheme not in _BUCKET_SCHEMES and max(ends) > self._files.info(path)["size"]:
                    # Some libraries abort the process if a range is beyond the end, instead of raising.
                    raise CheckpointError(f"{self.where(name)} cannot be read completely: it ends before {max(ends)}")
                return _content(self._files, path, ranges)
            except OSError as error:
                if not isinstance(error, FileNotFoundError) and error.errno != errno.EINVAL:  # a range beyond its end
                    raise
                self._require_bucket()
                raise CheckpointError(f"{self.where(name)} cannot be read completely: {self._clean(error)}") from None

        return self._trying(name, f"reading bytes {ranges[0][0]} to {ends[-1]}", call)

    def create(self, name: str, data: bytes) -> None:
        """Write a small object unless it exists.

        In a store without conditional writes, the last of several writers wins. A caller that must be the only writer
        reads the object back.
        """

        def call() -> None:
            try:
                self._files.pipe_file(self._path(name), data, mode="create")
            except FileExistsError:
                return
            except OSError as error:
                if error.errno != errno.ENOSYS:  # a server without conditional writes
                    raise
                if not self._files.exists(self._path(name)):
                    self._files.pipe_file(self._path(name), data)

        self._make_folder(name)
        self._trying(name, "creating", call)

    def upload(self, name: str, pieces: Sequence[memoryview]) -> None:
        """Write an object of any size in pieces; on failure, a partial object may be left under the name."""
        size_bytes = sum(map(len, pieces))
        self._make_folder(name)
        self._trying(name, f"writing {size_bytes} bytes", lambda: self._upload(name, pieces, size_bytes))

    def modified_at_s(self, name: str) -> float | None:
        """Return the object's modification time by the server's clock, in seconds; None if unknown."""

        def call() -> float | None:
            try:
                found: datetime = self._files.modified(self._path(name))
            except (FileNotFoundError, NotImplementedError):
                return None
            return found.timestamp()

        return self._trying(name, "looking at", call)

    def remove(self, name: str) -> None:
        """Delete an object; a missing one is not an error."""

        def call() -> None:
            try:
                self._files.rm_file(self._path(name))
            except FileNotFoundError:
                self._require_bucket()

        self._trying(name, "deleting", call)

    # ---- one operation

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _list(self, folder: str) -> list[tuple[str, str, int]]:
        def call() -> list[tuple[str, str, int]]:
            self._files.invalidate_cache()
            try:
                found = _entries(self._files, self._path(folder))
            except FileNotFoundError:
                found = []
            if not found:
                self._require_bucket()
                if self._scheme in _BUCKET_SCHEMES:
                    _require_absence(self._files, self._path(f"{folder}/no-such-object-{secrets.token_hex(8)}"))
            return [
                (entry["name"].rstrip("/").rpartition("/")[2], entry["type"], int(entry.get("size") or 0))
                for entry in found
            ]

        return self._trying(folder, "listing", call)

    def _require_bucket(self) -> None:
        """Raise if the bucket is missing; object stores list a missing bucket like an empty folder."""
        if self._scheme in _BUCKET_SCHEMES:
            self._files.info(self._root.lstrip("/").partition("/")[0])

    def _make_folder(self, name: str) -> None:
        # In a bucket, a folder is only part of a name, and this call would create a bucket.
        if self._scheme not in _BUCKET_SCHEMES:
            folder = self._path(name).rpartition("/")[0]
            self._trying(name, "making the folder of", lambda: self._files.makedirs(folder, exist_ok=True))

    def _upload(self, name: str, pieces: Sequence[memoryview], size_bytes: int) -> None:
        block_bytes = max(_PART_BYTES, -(-size_bytes // _MOST_PARTS))
        file = self._files.open(self._path(name), "wb", block_size=block_bytes)
        try:
            for view in pieces:
                for start in range(0, len(view), _PIECE_BYTES):  # the file buffers pieces of any size
                    # A copy: a view in an error's traceback would keep its memory mapped.
                    file.write(bytes(view[start : start + _PIECE_BYTES]))
        except BaseException:
            # Closing the file would complete the object. Leftovers of a multipart upload only take space.
            self._discard(file)
            raise
        file.close()

    @staticmethod
    def _discard(file: Any) -> None:
        try:
            if hasattr(file, "discard"):
                file.discard()
                file.closed = True
        except Exception:  # only the first failure is reported
            return

    # ---- failures

    def _trying(self, name: str, doing: str, call: Callable[[], Value]) -> Value:
        began, pause_s, tries = time.monotonic(), _FIRST_PAUSE_S, 0
        while True:
            tries += 1
            try:
                return call()
            except Exception as error:  # every protocol has its own exceptions
                if isinstance(error, StoreError):
                    raise
                spent_s = time.monotonic() - began
                if self._is_final(error) or spent_s + pause_s > self._patience_s:
                    raise self._failure(name, doing, error, tries, spent_s) from None
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    @staticmethod
    def _is_final(error: Exception) -> bool:
        if isinstance(error, OSError) and error.errno in _FINAL_NUMBERS:
            return True
        kinds = (FileNotFoundError, FileExistsError, PermissionError, NotImplementedError, TypeError, ValueError)
        return isinstance(error, kinds) or _is_about_credentials(error)

    def _failure(self, name: str, doing: str, error: Exception, tries: int, spent_s: float) -> StoreError:
        where = self.where(name)
        if _is_about_credentials(error):
            return StoreError(f"{where}: {doing} was refused: {self._clean(error)}; {_CREDENTIALS_MEND}")
        if isinstance(error, FileNotFoundError) and self._scheme in _BUCKET_SCHEMES and self._is_bucket_missing(error):
            bucket = self._root.lstrip("/").partition("/")[0]
            return StoreError(
                f"{where}: {doing} failed: there is no bucket {bucket!r}: create it (for s3: `aws s3 mb "
                f"s3://{bucket}`) or correct CHECKPOINT_PATH"
            )
        if self._is_final(error):
            return StoreError(f"{where}: {doing} failed: {self._clean(error)}; {_OTHER_MEND}")
        tried = f"tried {counted(tries, 'time')} in {spent_s:.0f} s"
        told = StoreError(f"{where}: {doing} failed, {tried}: {self._clean(error)}; {_NETWORK_MEND}")
        told.may_pass = True
        return told

    def _is_bucket_missing(self, error: FileNotFoundError) -> bool:
        if "bucket" in str(error).lower():
            return True
        try:
            self._require_bucket()
        except FileNotFoundError:
            return True
        except Exception:  # unknown for now: report the original failure
            return False
        return False

    @staticmethod
    def _clean(error: Exception) -> str:
        text = shortened(words_without_credentials(str(error)).split("?")[0], 300)
        return f"{type(error).__name__}{': ' if text else ''}{text}"


def _entries(files: Any, path: str) -> list[dict[str, Any]]:
    return _s3_entries(files, path) if _is_s3(files) else list(files.ls(path, detail=True))


def _content(files: Any, path: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
    """Return the bytes of each (start, end) range."""
    if _is_s3(files):
        return _s3_read(files, path, ranges)
    starts, ends = [start for start, _ in ranges], [end for _, end in ranges]
    return list(map(bytes, files.cat_ranges([path] * len(ranges), starts, ends, max_gap=None, on_error="raise")))


def _is_s3(files: Any) -> bool:
    return "s3" in ((files.protocol,) if isinstance(files.protocol, str) else files.protocol)


def _require_absence(files: Any, path: str) -> None:
    """Raise if the server returns an object that cannot exist.

    Its empty listing is then meaningless: a proxy, a web page or a broken gateway answers every request with 200, which
    s3fs interprets as "no objects".
    """
    try:
        _content(files, path, [(0, 1)])
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: the server returned an empty object, which has no range
            raise
    raise OSError(
        errno.EBADMSG,
        "the server lists no objects, but returns one that cannot exist, so it is not an object store",
    )


def _is_about_credentials(error: Exception) -> bool:
    # By name, because the classes of boto, google-auth and azure exist only if those packages are installed.
    return isinstance(error, PermissionError) or re.search("Credential|Token|Auth", type(error).__name__) is not None


_MOST_ANSWER_BYTES = 16 * 1024 * 1024
"""Limit of a response that is not an object's content; one page of a listing has 1,000 entries."""
_MOST_ENTRIES = 100_000
"""Limit of one folder: a job keeps few points, each of two objects."""
_LISTING_S = 60.0
_S3_MEND = "check that AWS_ENDPOINT_URL names the server, and that no proxy answers for it; saved data is intact"


def _s3_entries(files: Any, path: str) -> list[dict[str, Any]]:
    """Return the objects and folders directly below a path, in the format of ``ls``.

    Raises:
        StoreError: there are more objects than any job saves.
        TimeoutError: the listing does not end.
    """
    from fsspec.asyn import sync

    found = sync(files.loop, files._lsdir, path, refresh=True, max_items=_MOST_ENTRIES, timeout=_LISTING_S)
    if len(found) >= _MOST_ENTRIES:
        raise StoreError(f"s3://{path} holds {len(found)} objects or more, which no job saves; {_S3_MEND}")
    return list(found)


def _s3_read(files: Any, path: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
    """Return the bytes of each range of an object, even if the server sends more."""
    from fsspec.asyn import sync

    return list(sync(files.loop, _s3_read_ranges, files, path, ranges))


async def _s3_read_ranges(files: Any, path: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
    async def one(start: int, end: int) -> bytes:
        bucket, key, _ = files.split_path(path)
        answer = await files._call_s3("get_object", Bucket=bucket, Key=key, Range=f"bytes={start}-{end - 1}")
        body, found = answer["Body"], bytearray()
        try:
            while len(found) < end - start and (piece := await body.read(end - start - len(found))):
                found += piece
        finally:
            body.close()
        return bytes(found)

    return list(await asyncio.gather(*(one(start, end) for start, end in ranges)))


@functools.cache
def bounded_session() -> type:
    """Return aiobotocore's HTTP client, with a size limit on responses other than objects."""
    from aiobotocore.httpsession import AIOHTTPSession

    class Bounded(AIOHTTPSession):  # type: ignore[misc]
        async def send(self, request: Any) -> Any:
            is_content, request.stream_output = request.stream_output, True
            response = await super().send(request)
            if not is_content:
                response._content = await self._whole(response.raw)
            return response

        @staticmethod
        async def _whole(raw: Any) -> bytes:
            body = bytearray()
            async for piece in raw.content.iter_any():
                body += piece
                if len(body) > _MOST_ANSWER_BYTES:
                    raw.close()
                    raise StoreError(
                        f"{raw.url.host}: the server's answer has more than {_MOST_ANSWER_BYTES} bytes, so it is "
                        f"not an object store; {_S3_MEND}"
                    )
            return bytes(body)

    return Bounded
