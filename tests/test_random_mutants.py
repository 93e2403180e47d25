"""The sampler changes exactly one token anywhere in a file, and identifies what noticed it."""

from __future__ import annotations

import ast

import pytest

from tests.random_mutants import QUICK, REPOSITORY, mutants_of, mutants_of_room, named_in


@pytest.mark.parametrize(
    ("line", "changed"),
    [
        ("a < b", ["a <= b"]),
        ("a < b <= c", ["a <= b <= c", "a < b < c"]),
        ("a == (b)", ["a != (b)"]),
        ("a is not None", ["a is None"]),
        ("a  not  in b", ["a  in b"]),
        ("a and b and c", ["a or b and c", "a and b or c"]),
        ("not (a or b)", ["(a or b)", "not (a and b)"]),
        ("a + b - c", ["a - b - c", "a + b + c"]),
        ("(a) + ('ä', b)[1 + 1]", ["(a) - ('ä', b)[1 + 1]", "(a) + ('ä', b)[1 - 1]"]),
        ("a + 'text'", []),
        ("f'{a + b}'", []),
        ("a * -b", []),
    ],
)
def test_every_token_is_changed_alone(line: str, changed: list[str]) -> None:
    source = f"# ein Wort: ü\nx = {line}  # a < b\n".encode()
    found = mutants_of("file.py", source)
    assert [mutant.applied(source).decode().splitlines()[1] for mutant in found] == [
        f"x = {one}  # a < b" for one in changed
    ]


@pytest.mark.parametrize("room", QUICK)
def test_every_mutant_of_a_package_is_valid_python(room: str) -> None:
    found = mutants_of_room(room)
    assert len(found) > 100
    assert len({(mutant.path, mutant.at) for mutant in found}) == len(found)
    for mutant in found[::20]:
        assert mutant.old != mutant.new
        ast.parse(mutant.applied((REPOSITORY / mutant.path).read_bytes()))


def test_failure_that_noticed_it_is_read_from_the_output() -> None:
    assert named_in("..F\nFAILED tests/a.py::test_b[c - d] - assert 1 == 2\n1 failed") == "tests/a.py::test_b[c - d]"
    assert named_in("ERROR tests/a.py\n") == "tests/a.py"
    assert named_in("\n\nseed 17: S3: node 2 was seated\n") == "seed 17: S3: node 2 was seated"
    assert named_in("all is well") == ""
