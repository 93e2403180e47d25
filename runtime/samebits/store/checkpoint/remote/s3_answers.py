"""What an S3 server answers, read no further than a bound.

s3fs reads an object until the server stops sending, and a listing for as long as the server names a next page. All
that relies on the inside of s3fs and aiobotocore is here: ``_lsdir`` with ``max_items``, ``_call_s3`` and its
``Body``, the session class, and that a response keeps its body in ``_content``.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from typing import Any

from samebits.errors import StoreError

_MOST_ANSWER_BYTES = 16 * 1024 * 1024
"""Of an answer that isn't an object's content: a page of a listing has 1,000 entries."""
_MOST_ENTRIES = 100_000
"""In one folder: a job keeps few points, each of two objects."""
_LISTING_S = 60.0
_MEND = "see that AWS_ENDPOINT_URL names the server, and that no proxy answers for it; what was saved is unharmed"


def entries(files: Any, path: str) -> list[dict[str, Any]]:
    """The objects and folders right below a path, as ``ls`` gives them.

    Raises:
        StoreError: there are more than any job saves.
        TimeoutError: the listing has no end.
    """
    from fsspec.asyn import sync

    found = sync(files.loop, files._lsdir, path, refresh=True, max_items=_MOST_ENTRIES, timeout=_LISTING_S)
    if len(found) >= _MOST_ENTRIES:
        raise StoreError(f"s3://{path}: holds {len(found)} objects or more, which no job saves; {_MEND}")
    return list(found)


def read(files: Any, path: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
    """The bytes of an object from each start to each end, and never more, whatever the server sends."""
    from fsspec.asyn import sync

    return list(sync(files.loop, _read, files, path, ranges))


async def _read(files: Any, path: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
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
    """The HTTP client of aiobotocore, which reads an answer whole, with a bound on what isn't an object's content."""
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
                        f"{raw.url.host}: an answer has more than {_MOST_ANSWER_BYTES} bytes: what answers is no "
                        f"object store; {_MEND}"
                    )
            return bytes(body)

    return Bounded
