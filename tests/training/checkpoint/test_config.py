"""``CheckpointConfig``: MindSpore's options, and the message for each that has no meaning here."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from samebits.errors import UsageError
from samebits.training.state.checkpoint_config import _MINDSPORES, CheckpointConfig


def test_steps_are_the_default_schedule() -> None:
    assert (CheckpointConfig().save_checkpoint_steps, CheckpointConfig().save_checkpoint_seconds) == (100, 0)
    assert CheckpointConfig(7).save_checkpoint_steps == 7
    assert CheckpointConfig(save_checkpoint_steps="auto").save_checkpoint_steps == "auto"


def test_copies_are_kept_if_there_is_another_host() -> None:
    assert CheckpointConfig().buddy_copies == "auto"
    assert [CheckpointConfig(buddy_copies=value).buddy_copies for value in (True, False)] == [True, False]


@pytest.mark.parametrize("steps", [None, 0])
def test_seconds_alone_and_with_zero_steps_as_in_mindspore(steps: int | None) -> None:
    config = CheckpointConfig(save_checkpoint_steps=steps, save_checkpoint_seconds=0.5)
    assert (config.save_checkpoint_steps, config.save_checkpoint_seconds) == (0, 0.5)


@pytest.mark.parametrize(
    "wrong",
    [
        {"save_checkpoint_steps": 0},
        {"save_checkpoint_steps": -1},
        {"save_checkpoint_steps": 1.5},
        {"save_checkpoint_steps": True},
        {"save_checkpoint_steps": "often"},
        {"save_checkpoint_seconds": -1},
        {"save_checkpoint_seconds": float("nan")},
        {"save_checkpoint_seconds": float("inf")},
        {"save_checkpoint_seconds": "60"},
        {"save_checkpoint_seconds": True},
        {"save_checkpoint_steps": 100, "save_checkpoint_seconds": 60},
        {"save_checkpoint_steps": "auto", "save_checkpoint_seconds": 60},
        {"keep_checkpoint_max": 1},
        {"keep_checkpoint_max": 2.5},
        {"buddy_copies": "always"},
        {"buddy_copies": 2},
        {"buddy_copies": None},
        {"prefix": "a/b"},
        {"prefix": ".."},
        {"prefix": "0"},
        {"prefix": ".hidden"},
    ],
)
def test_invalid_value_is_refused_in_one_sentence(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))) as caught:
        CheckpointConfig(**wrong)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("keep_checkpoint_per_n_minutes", 10, "keep_checkpoint_max"),
        ("integrated_save", False, "samebits ckpt export"),
        ("saved_network", object(), "TorchState"),
        ("append_info", ["epoch_num"], "TorchState"),
        ("enc_key", b"0123456789abcdef", "encrypted file system"),
        ("enc_mode", "SM4-CBC", "encrypted file system"),
        ("exception_save", True, "last commit"),
        ("crc_check", False, "always hashed"),
        ("remove_redundancy", True, "one is enough"),
        ("format", "ckpt", "samebits ckpt export"),
    ],
)
def test_unsupported_option_names_its_replacement(name: str, value: object, instead: str) -> None:
    with pytest.raises(UsageError, match=instead) as caught:
        CheckpointConfig(**{name: value})
    assert str(caught.value).startswith(f"{name}=")


def test_options_for_built_in_behaviour_are_accepted() -> None:
    taken = {name: meant[0] for name, (meant, _) in _MINDSPORES.items()}
    assert CheckpointConfig(**taken) == CheckpointConfig()
    assert CheckpointConfig(append_info=[], keep_checkpoint_per_n_minutes=0) == CheckpointConfig()
    with pytest.raises(TypeError, match="save_often"):
        CheckpointConfig(save_often=True)  # type: ignore[call-arg]


def test_such_options_are_arguments_and_not_attributes() -> None:
    fields = {field.name for field in dataclasses.fields(CheckpointConfig)}
    assert fields & _MINDSPORES.keys() == set()
    assert {"save_checkpoint_steps", "save_checkpoint_seconds", "keep_checkpoint_max", "directory", "prefix"} <= fields


def test_prefix_is_a_folder_below_the_directory(tmp_path: Path) -> None:
    assert CheckpointConfig().folder_below(tmp_path / "ckpt") == tmp_path / "ckpt"
    assert CheckpointConfig(prefix="big").folder_below(tmp_path / "ckpt") == tmp_path / "ckpt" / "big"
    config = CheckpointConfig(directory=str(tmp_path / "other"), prefix="big")
    assert config.folder_below(tmp_path / "ckpt") == tmp_path / "other" / "big"
