"""The marker of the whole matrix."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full: the whole matrix; deselected by `make test`")
