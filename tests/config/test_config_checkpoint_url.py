"""CHECKPOINT_PATH as a folder or a URL: interpretation, and refusals that show no secret."""

from __future__ import annotations

from pathlib import Path

import pytest

from samebits import config
from samebits.errors import SettingsError, UsageError
from samebits.training.state.checkpoint_config import CheckpointConfig

SECRET = "verysecret"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("s3://bucket/folder", "s3://bucket/folder"),
        ("s3://bucket/folder/", "s3://bucket/folder"),
        ("memory://x", "memory://x"),
        ("hdfs://me@host:8020/folder", "hdfs://me@host:8020/folder"),
        ("hdfs://host:8020/folder@2", "hdfs://host:8020/folder@2"),
        ("s3://bucket/run@3", "s3://bucket/run@3"),
        ("abfss://container@account.dfs.core.windows.net/x", "abfss://container@account.dfs.core.windows.net/x"),
        ("file:///data/points", Path("/data/points")),
        ("FILE:///data", Path("/data")),
        ("./a:b", Path("a:b")),
        ("1st://odd", Path("1st://odd")),
    ],
)
def test_interpretation(text: str, found: Path | str) -> None:
    settings, warnings = config.read({"CHECKPOINT_PATH": text}, role_required=False)
    assert (settings.checkpoint_path, warnings) == (found, [])
    assert type(settings.checkpoint_path) is type(found) or isinstance(settings.checkpoint_path, Path)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("s3://", "the URL names no folder"),
        ("file://data", "expected an absolute path after file://"),
        ("simplecache::s3://bucket/folder", "a cache whose data is gone"),
        (f"hdfs://me:{SECRET}@host/folder", "credentials do not belong in a URL"),
        (f"hdfs://me:p@{SECRET}@host/folder", "credentials do not belong in a URL"),
        (f"s3://AKIA:ab/{SECRET}@bucket/folder", "credentials do not belong in a URL"),
    ],
)
def test_refused_values(text: str, why: str) -> None:
    with pytest.raises(SettingsError) as refused:
        config.read({"CHECKPOINT_PATH": text}, role_required=False)
    assert why in str(refused.value) and SECRET not in str(refused.value)
    with pytest.raises(UsageError) as wrong:
        CheckpointConfig(directory=text)
    assert why in str(wrong.value) and SECRET not in str(wrong.value)


def test_path_of_a_state(tmp_path: Path) -> None:
    assert CheckpointConfig(prefix="big").folder_below("s3://bucket/job") == "s3://bucket/job/big"
    assert CheckpointConfig().folder_below("s3://bucket/job") == "s3://bucket/job"
    assert CheckpointConfig(directory="s3://other/x").folder_below(tmp_path) == "s3://other/x"
    assert CheckpointConfig(directory=f"file://{tmp_path}").folder_below("s3://bucket/job") == tmp_path.resolve()
