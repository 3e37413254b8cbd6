"""Fixtures that all tests share."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for `--import-mode=importlib`

from pool import ALLOWED_WARNINGS, Pool

collect_ignore = ["annotated"]  # for the type checker, not to be run


def pytest_configure(config: pytest.Config) -> None:
    for allowed in ALLOWED_WARNINGS:
        config.addinivalue_line("filterwarnings", allowed.as_ini())


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Worker processes for distributed tests; see `pool.py`."""
    workers = Pool()
    yield workers
    workers.close()
