"""Shared by tests of whole systems."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon import until


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where private daemons put their sockets; a short name, and empty again at the end."""
    directory = Path(tempfile.mkdtemp(prefix="rt-", dir="/tmp"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))
    yield directory
    try:
        assert until(lambda: not list(directory.iterdir())), "a private daemon left its directory"
    finally:
        shutil.rmtree(directory)
