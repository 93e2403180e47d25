"""The report of recoveries on device meshes, from handwritten seconds."""

from __future__ import annotations

from benchmarks.mesh_recovery import CONTESTANTS, FSDP2, HSDP, people, report, variables_of
from benchmarks.report import problems
from benchmarks.workers.paced import MESH


def test_meshes_have_as_many_ranks_as_the_job() -> None:
    assert [variables_of(name, 8).get(MESH) for name in CONTESTANTS] == [None, "2,4", "8"]


def test_report_compares_each_mesh_with_ddp() -> None:
    totals_s = {"ddp": [0.1, 0.2, 0.3], HSDP: [0.2, 0.25, 0.9], FSDP2: [0.3, 0.4, 0.5]}
    lost, equal = dict.fromkeys(CONTESTANTS, 0) | {FSDP2: 2}, dict.fromkeys(CONTESTANTS, True) | {HSDP: False}
    found = report(totals_s, lost, equal)
    document = found.document()
    assert problems(document) == []
    ratios = document["ratios"]
    assert (ratios["hsdp_vs_ddp"], ratios["fsdp2_vs_ddp"]) == (1.25, 2.0)
    assert (ratios["hsdp_weights_vs_undisturbed"], ratios["fsdp2_weights_vs_undisturbed"]) == (0.0, 1.0)
    assert document["ours"]["steps_lost_fsdp2"] == 2
    assert "HSDP" in people(found) and "≤ 1.5" in people(found)
