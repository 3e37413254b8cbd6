"""The tests that the documentation names are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
TABLE = (TESTS.parent / "docs" / "reliability.md").read_text()
NAMED = sorted(set(re.findall(r"`(test_\w+\.py)::(test_\w+)`", TABLE)))


def test_every_row_names_a_test() -> None:
    rows = [line for line in TABLE.splitlines() if line.startswith("|")]
    rows = [row for row in rows if not row.startswith(("| kind |", "|---"))]
    assert len(rows) > 40
    for row in rows:
        assert row.count("|") == 4, row
        assert "::test_" in row.split("|")[3], row


@pytest.mark.parametrize("file", sorted({file for file, _ in NAMED}))
def test_named_tests_exist(file: str) -> None:
    tree = ast.parse((TESTS / file).read_text())
    there = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert {name for where, name in NAMED if where == file} <= there
