"""What holds for all tests: tokenized data is kept in a folder of the test session, not in the user's."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    # For every process of the tests; workers of pytest-xdist have a folder each.
    os.environ["XDG_CACHE_HOME"] = str(Path(tmp_path_factory.getbasetemp()) / "cache")
