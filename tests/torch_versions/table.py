"""The table of versions for docs/reference/support-matrix.md: one row per version."""

from __future__ import annotations

from collections.abc import Sequence

from tests.torch_versions.checks import Row

HEAD = ("torch", "probes", "tests", "kill with a spare", "kill with a restart", "bits")


def table(rows: Sequence[Row]) -> str:
    """Return it in Markdown."""
    return "\n".join([_line(HEAD), "|---" * len(HEAD) + "|", *(_line(cells(row)) for row in rows)])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def cells(row: Row) -> tuple[str, ...]:
    """Return one version's results."""
    if row.reason:
        return (row.version, f"not tried: {row.reason}", *["–"] * (len(HEAD) - 2))
    kills = [name for name in ("kill_with_a_spare", "kill_with_a_restart") if name in row.sha256]
    bits = "–" if not kills else "the same" if all(map(row.has_same_bits, kills)) else "differ"
    return (
        row.torch,
        str(row.probes),
        str(row.tests),
        *("went on" if name in kills else "failed" for name in ("kill_with_a_spare", "kill_with_a_restart")),
        bits,
    )
