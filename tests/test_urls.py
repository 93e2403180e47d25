"""URLs in messages: possible secrets are hidden, everything else is shown."""

from __future__ import annotations

import pytest

from samebits.urls import has_password, without_credentials, words_without_credentials

KEPT = [
    "s3://bucket/run@3",
    "s3://bucket/a:b@c",
    "s3://bucket",
    "hdfs://host:8020/a@b",
    "hdfs://host:8020",
    "hdfs://me@host/folder",
    "hdfs://me@host:8020/a@b",
    "hdfs://[fd00::1]/a@b",
    "hdfs://me@[fd00::1]:8020/a@b",
    "http://host:8020?to=a@b",
    "abfss://container@account.dfs.core.windows.net/x",
    "a:b@c",
]
HIDDEN = [
    ("hdfs://me:secret@host/x", "hdfs://(hidden)@host/x"),
    ("hdfs://me:s@cret@host/x", "hdfs://(hidden)@host/x"),
    ("hdfs://me@example.org:secret@host/x", "hdfs://(hidden)@host/x"),
    ("hdfs://me@example.org:s/cret@host/x", "hdfs://(hidden)@host/x"),
    ("hdfs://me:8020@host/x", "hdfs://(hidden)@host/x"),
    ("hdfs://:secret@host:8020/x", "hdfs://(hidden)@host:8020/x"),
    ("hdfs://me:s cr\net@host/x", "hdfs://(hidden)@host/x"),
    ("s3://AKIA:se/cr/et@bucket/x", "s3://(hidden)@bucket/x"),
    ("s3://AKIA:s@/cret@bucket/x", "s3://(hidden)@bucket/x"),
    ("s3://AKIA:123456/cret@bucket/x", "s3://(hidden)@bucket/x"),
    ("simplecache::s3://AKIA:se/cret@bucket/x", "simplecache::s3://(hidden)@bucket/x"),
]


@pytest.mark.parametrize("url", KEPT)
def test_url_without_a_password_is_shown_unchanged(url: str) -> None:
    assert (has_password(url), without_credentials(url)) == (False, url)


@pytest.mark.parametrize(("url", "shown"), HIDDEN)
def test_password_is_hidden_to_its_last_character(url: str, shown: str) -> None:
    assert (has_password(url), without_credentials(url)) == (True, shown)


def test_urls_in_foreign_text_show_no_user() -> None:
    said = (
        "no answer from\nhttp://key@proxy:3128, asked for 's3://AKIA:se/cret@bucket/x'; mail to a@b, or http://host:80"
    )
    assert words_without_credentials(said) == (
        "no answer from http://(hidden)@proxy:3128, asked for 's3://(hidden)@bucket/x'; mail to a@b, or http://host:80"
    )
