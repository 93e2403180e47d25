"""Messages when an object store refuses or is unreachable: URL, what was tried and the fix."""

from __future__ import annotations

import contextlib
import http.server
import itertools
import logging
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import s3fs

from samebits.errors import StoreError
from samebits.store.checkpoint import object_store
from samebits.store.checkpoint.object_store import ObjectStore
from samebits.store.checkpoint.remote_points import RemotePointStore, slots_at
from tests.store.checkpoint.conftest import Folder
from tests.store.checkpoint.remote.remote_points import assert_is, find, points, prune, save
from tests.store.checkpoint.remote.s3_server import CREDENTIALS, S3Server


def test_wrong_credentials(bucket: Folder, s3: S3Server) -> None:
    save(bucket.place(), 1)
    s3.check_credentials(True)
    for attempt in (lambda: save(bucket.place(), 2), bucket.place().scan, lambda: prune(bucket.place(), 2)):
        with pytest.raises(StoreError, match=r"s3://points/job/0\S*: \w+ was refused: .*AWS_ACCESS_KEY_ID") as refused:
            attempt()
        assert CREDENTIALS["AWS_ACCESS_KEY_ID"] + ":" not in str(refused.value)
        assert CREDENTIALS["AWS_SECRET_ACCESS_KEY"] not in str(refused.value)
    s3.check_credentials(False)
    assert points(bucket.place()) == [(1, 1)]


def test_no_credentials(bucket: Folder, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    with pytest.raises(StoreError, match=r"listing was refused: NoCredentialsError.*AWS_PROFILE"):
        bucket.place().scan()


def test_missing_bucket_does_not_pass_for_an_empty_folder(s3: S3Server) -> None:
    place = Folder("s3://no-such-bucket/job").place()
    for attempt in (place.scan, lambda: save(place, 1), lambda: slots_at("s3://no-such-bucket/job")):
        with pytest.raises(StoreError, match=r"there is no bucket 'no-such-bucket': create it .*aws s3 mb"):
            attempt()


def test_unreachable_server(bucket: Folder, s3: S3Server) -> None:
    place = bucket.place(patience_s=0.0)
    s3.stop()
    with pytest.raises(StoreError, match=r"s3://points/job/0: listing failed, tried 1 time in .*server answers"):
        place.scan()


@pytest.mark.parametrize("moment", ["owner.json", ".data.safetensors", ".manifest.msgpack"])
def test_server_that_stops_and_returns(bucket: Folder, s3: S3Server, moment: str) -> None:
    gone: list[threading.Thread] = []

    def go_away(request: str) -> None:
        if request.startswith("PUT") and request.endswith(moment) and not gone:
            gone.append(threading.Thread(target=lambda: (s3.stop(), s3.start())))
            gone[0].start()
            raise ConnectionAbortedError("the server dies with this request")

    s3.before = go_away
    save(bucket.place(patience_s=60.0), 1)
    gone[0].join()
    assert_is(bucket.place().read(find(bucket.place(), 1)), 1)
    assert len(bucket.names()) == 3


def test_server_that_stays_down_costs_this_point_only(bucket: Folder, s3: S3Server) -> None:
    save(bucket.place(), 1)
    place = bucket.place(patience_s=0.0)
    dying: list[threading.Thread] = []

    def go_away(request: str) -> None:
        if request.startswith("PUT") and not dying:
            dying.append(threading.Thread(target=s3.stop))
            dying[0].start()
            raise ConnectionAbortedError("the server dies with this request")

    s3.before = go_away
    with pytest.raises(StoreError, match=r"writing \d+ bytes failed, tried 1 time"):
        save(place, 2)
    dying[0].join()
    s3.start()
    assert points(place) == [(1, 1)]
    save(place, 3)
    assert points(place) == [(3, 1), (1, 1)]


def test_overloaded_server_is_retried(bucket: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    store, calls = ObjectStore(bucket.url, patience_s=30.0), []
    original = store._files._lsdir

    async def busy(*args: Any, **options: Any) -> Any:
        calls.append(args)
        if len(calls) < 3:
            raise OSError(16, "Please reduce your request rate")
        return await original(*args, **options)

    monkeypatch.setattr(store._files, "_lsdir", busy)
    monkeypatch.setattr(object_store, "_FIRST_PAUSE_S", 0.001)
    assert store.sizes("0") == {}
    assert len(calls) == 3


def test_broken_upload_is_never_completed(monkeypatch: pytest.MonkeyPatch, bucket: Folder, s3: S3Server) -> None:
    """An fsspec file object completes the object on close, also when ``with`` is left by an exception."""
    monkeypatch.setattr(object_store, "_PART_BYTES", 5 * 1024 * 1024)
    store = ObjectStore(bucket.url, patience_s=0.0)
    data = memoryview(bytes(12 * 1024 * 1024))
    pieces = [data, None]  # the second cannot be written
    with pytest.raises((StoreError, TypeError)):
        store._upload("0/big", pieces, len(data))  # type: ignore[arg-type]
    assert s3.names() == []
    assert s3.client.list_multipart_uploads(Bucket="points").get("Uploads", []) == []


def test_without_fsspec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(StoreError, match=r"job: the package for s3:// is not installed .*samebits\[remote\]"):
        RemotePointStore("s3://bucket/job", 0, job="j", job_name="n")


def test_missing_library_for_the_scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(StoreError, match=r"gs://bucket/job: the package for gs:// is not installed .*gcsfs"):
        RemotePointStore("gs://bucket/job", 0, job="j", job_name="n").scan()


def test_unknown_scheme() -> None:
    with pytest.raises(StoreError, match="nonsense://here: ValueError: Protocol not known"):
        ObjectStore("nonsense://here").folders()


def test_credentials_are_never_shown(caplog: pytest.LogCaptureFixture) -> None:
    assert ObjectStore("hdfs://me:ver@y/secret@host/x").url == "hdfs://(hidden)@host/x"
    with socket.socket() as nobody, caplog.at_level(logging.DEBUG, "samebits"):
        nobody.bind(("127.0.0.1", 0))
        url = f"ftp://me:verysecret@127.0.0.1:{nobody.getsockname()[1]}/x"
        with pytest.raises(StoreError) as failure:
            ObjectStore(url, patience_s=0.0).sizes("0")
    assert "verysecret" not in str(failure.value) + caplog.text
    assert "127.0.0.1" in str(failure.value)


def test_credentials_are_removed_from_library_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(url: str) -> None:
        raise ValueError("s3://AKIA:se/cret@bucket\ncannot be reached through http://cret@proxy:3128")

    monkeypatch.setattr("fsspec.core.url_to_fs", refuse)
    with pytest.raises(
        StoreError, match=r"ValueError: s3://\(hidden\)@bucket .* http://\(hidden\)@proxy:3128; "
    ) as told:
        ObjectStore("s3://bucket").folders()
    assert "cret" not in str(told.value)


def test_local_job_never_imports_fsspec() -> None:
    program = "import sys, samebits.store.checkpoint; sys.exit('fsspec' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0


# ---- servers that are not object stores

HTML = b"<html><body>Sign in to the network</body></html>"
OTHER_XML = b'<?xml version="1.0"?><ListBuckets><Owner/></ListBuckets>'
REFUSAL = b'<?xml version="1.0"?><Error><Code>SlowDown</Code><Message>later</Message></Error>'
HALF = b'<?xml version="1.0"?><ListBucketResult><Contents><Key>job/0/own'
PAGE = b'<?xml version="1.0"?><ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken>%d\
</NextContinuationToken>%s</ListBucketResult>'
ENTRY = b"<Contents><Key>job/0/x%d</Key><Size>1</Size><LastModified>2026-01-01T00:00:00Z</LastModified></Contents>"
PIECE = bytes(1 << 20)


@pytest.fixture
def impostor(monkeypatch: pytest.MonkeyPatch) -> Iterator[Impostor]:
    with Impostor() as server, server.serving():
        for name, value in {**CREDENTIALS, "AWS_MAX_ATTEMPTS": "1", "AWS_ENDPOINT_URL": server.url}.items():
            monkeypatch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        yield server
    s3fs.S3FileSystem.clear_instance_cache()


class Impostor(http.server.ThreadingHTTPServer):
    """Answers every request with 200 and what ``answer`` makes of its path; counts the bytes sent."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Impostors)
        self.answer: Callable[[str], Iterable[bytes]] = lambda path: ()
        self.sent_bytes = 0
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield
        self.shutdown()
        thread.join()


class _Impostors(http.server.BaseHTTPRequestHandler):
    server: Impostor

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            for piece in self.server.answer(self.path) if self.command == "GET" else ():
                self.wfile.write(piece)
                self.server.sent_bytes += len(piece)

    do_HEAD = do_PUT = do_GET

    def log_message(self, *_: object) -> None:
        """Do not log requests."""


def _pages(entry: bytes) -> Callable[[str], Iterable[bytes]]:
    """Return an endless listing whose pages have a thousand of these entries, or none."""
    numbers = itertools.count()

    def answer(path: str) -> Iterable[bytes]:
        number = next(numbers)
        entries = (entry % (1000 * number + one) for one in range(1000)) if entry else ()
        return [PAGE % (number, b"".join(entries))]

    return answer


@pytest.mark.parametrize("body", [HTML, b"", OTHER_XML, REFUSAL, HALF], ids=["html", "empty", "other", "error", "half"])
def test_nonsense_answers_do_not_pass_for_an_empty_store(impostor: Impostor, body: bytes) -> None:
    impostor.answer = lambda path: [body]
    place = Folder("s3://points/job").place(patience_s=0.0)
    for attempt in (place.scan, lambda: slots_at("s3://points/job", patience_s=0.0), lambda: save(place, 1)):
        with pytest.raises(StoreError, match=r"s3://points/job") as told:
            attempt()
        assert type(told.value) is StoreError, "this is neither another job's folder nor a damaged point"


def test_listing_without_a_readable_object_is_an_error(bucket: Folder, s3: S3Server) -> None:
    save(bucket.place(), 1)
    whole = s3._app

    def without_listings(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if "list-type" in environ["QUERY_STRING"]:
            start_response("200 OK", [("Content-Type", "application/xml")])
            return [OTHER_XML]
        return whole(environ, start_response)  # type: ignore[no-any-return]

    s3._app = without_listings  # type: ignore[assignment]
    with pytest.raises(StoreError, match=r"job/0/owner\.json can be read, but the server lists no such object"):
        bucket.place().scan()


def test_endless_object_is_read_no_further_than_requested(impostor: Impostor) -> None:
    impostor.answer = lambda path: itertools.repeat(PIECE)
    store = ObjectStore("s3://points/job", patience_s=0.0)
    assert store.read("0/owner.json", 1000) == bytes(1000)
    assert store.read_ranges("0/data", [(10, 20), (30, 50)]) == [bytes(10), bytes(20)]
    assert impostor.sent_bytes < 64 * len(PIECE), "data in the sockets' buffers"


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (lambda path: itertools.repeat(PIECE), "answer has more than"),
        (_pages(ENTRY), r"holds \d+ objects or more"),
        (_pages(b""), "Timeout"),
    ],
    ids=["body", "entries", "pages"],
)
def test_endless_listing_is_given_up(
    impostor: Impostor, monkeypatch: pytest.MonkeyPatch, answer: Callable[[str], Iterable[bytes]], told: str
) -> None:
    monkeypatch.setattr(object_store, "_MOST_ENTRIES", 5000)
    monkeypatch.setattr(object_store, "_LISTING_S", 1.0 if told == "Timeout" else 60.0)
    impostor.answer = answer
    with pytest.raises(StoreError, match=told):
        ObjectStore("s3://points/job", patience_s=0.0).sizes("0")
    assert impostor.sent_bytes < 128 * len(PIECE)
