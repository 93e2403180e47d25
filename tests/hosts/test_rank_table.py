"""Ascend's rank tables: reading, refusing, making and joining them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from samebits.errors import SettingsError
from samebits.hosts.rank_table import addresses_in, joined, made, main, parse, text_of

HCCN = "address_0=192.0.2.10\nnetmask_0=255.255.255.0\naddress_1 = 192.0.2.11\n"


def table(**changes: Any) -> dict[str, Any]:
    """Return a table of two servers with two NPUs each."""
    servers = [
        {
            "server_id": f"node_{server}",
            "device": [
                {"device_id": str(at), "device_ip": f"192.0.2.{10 * server + at}", "rank_id": str(2 * server + at)}
                for at in (0, 1)
            ],
        }
        for server in (0, 1)
    ]
    return {"status": "completed", "version": "1.0", "server_count": "2", "server_list": servers, **changes}


def read(plain: object, *, strict: bool = False) -> Any:
    return parse(json.dumps(plain).encode(), "t.json", strict=strict)


def test_complete_table_is_read_without_complaint() -> None:
    found = read(table(), strict=True)
    assert (found.table.world_size, found.lacks) == (4, ())
    assert read(table(more={"unknown": 1})).table == found.table, "unknown fields are left alone"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"version": "2.0"}, "version '2.0': expected 1.0 or 1.2"),
        ({"status": "initializing"}, "it is not complete"),
        ({"server_count": "3"}, "server_count '3', but there are 2"),
        ({"server_list": table()["server_list"][:1] * 2}, "another for each"),
        ({"server_list": table()["server_list"][1:], "server_count": "1"}, "the rank_id are not 0 to 1, each once"),
        ({"server_list": [], "server_count": "0"}, "the rank_id are not 0 to 0"),
        ({"server_list": [{"server_id": "a", "device": [{"device_id": "x", "rank_id": "0"}]}]}, "device_id 'x'"),
        ({"server_list": 7}, r"is not a rank table: Expected `array`, got `int` - at `\$\.server_list`"),
        ({"version": 1.0}, r"Expected `str`, got `float` - at `\$\.version`"),
    ],
)
def test_unreliable_table_is_refused_with_the_place(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingsError, match=says) as refused:
        read(table(**changes))
    assert all("Fix: " in line for line in str(refused.value).splitlines())


@pytest.mark.parametrize("text", [b"", b"[", b"\xff\xfe", b"[" * 5000, b"null", b'"x"'])
def test_invalid_json_is_refused_in_a_sentence(text: bytes) -> None:
    with pytest.raises(SettingsError, match="is not a rank table"):
        parse(text, "t.json", strict=False)


def test_strict_enforces_what_hccl_needs_and_soft_reports_it() -> None:
    bare = table(status="")
    del bare["server_list"][1]["device"][1]["device_ip"]
    assert [one.partition(".")[0] for one in read(bare).lacks] == [
        "status is missing",
        "server node_1, device 1: device_ip '' is not an address",
    ]
    with pytest.raises(SettingsError, match="device_ip '' is not an address"):
        read(bare, strict=True)


def test_every_server_and_device_of_super_pods_is_named() -> None:
    lacks = read(table(version="1.2")).lacks
    assert sum("super_device_id is missing" in one for one in lacks) == 4 and "super_pod_list" in lacks[-1]
    pods = [{"super_pod_id": "0", "server_list": [{"server_id": "node_0"}, {"server_id": "node_1"}]}]
    whole = table(version="1.2", super_pod_list=pods)
    for server in whole["server_list"]:
        for device in server["device"]:
            device["super_device_id"] = device["rank_id"]
    found = read(whole, strict=True)
    assert json.loads(text_of(found.table)) == whole


def test_tables_of_servers_are_made_and_joined(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "hccn.conf").write_text(HCCN)
    assert addresses_in(HCCN) == {0: "192.0.2.10", 1: "192.0.2.11"}
    for name in ("a", "b"):
        assert main(["make", "--server-id", name, "--hccn", str(tmp_path / "hccn.conf")]) == 0
        (tmp_path / f"{name}.json").write_text(capsys.readouterr().out)
    assert main(["join", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 0
    (tmp_path / "both.json").write_text(capsys.readouterr().out)
    assert main(["check", "--strict", str(tmp_path / "both.json")]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "server a: rank 0 on NPU 0, 1 on NPU 1",
        "server b: rank 2 on NPU 0, 3 on NPU 1",
        "version 1.0, 4 ranks on 2 servers",
    ]


def test_devices_keep_their_given_order() -> None:
    one = made("a", [3, 1], {})
    assert [(device.device_id, device.rank_id) for device in one.server_list[0].device] == [("3", "0"), ("1", "1")]
    assert [device.rank_id for server in joined([one, made("b", [0], {})]).server_list for device in server.device] == [
        *"012"
    ]


@pytest.mark.parametrize("words", [["make", "--hccn", "nowhere.conf"], ["check", "nowhere.json"]])
def test_missing_parts_are_reported(words: list[str]) -> None:
    with pytest.raises(SettingsError, match=r"nowhere.*Fix: "):
        main(words)
