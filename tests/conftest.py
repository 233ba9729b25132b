"""Shared by all tests: order (fast ones first), and the rule that io_uring must have been exercised."""

from __future__ import annotations

import os
import signal

import pytest

_uring = {"passed": 0, "selected": 0}


def pytest_configure() -> None:
    """A shell's background job has SIGINT ignored, which the ranks and daemons started here would inherit."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests last; otherwise as collected."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)
    _uring["selected"] = sum(item.get_closest_marker("uring") is not None for item in items)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and report.passed and "uring" in report.keywords:
        _uring["passed"] += 1


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """CI fails if tests of io_uring were selected, the kernel has it, and none of them ran."""
    required = os.environ.get("TESTS_REQUIRE_URING") and _uring["selected"]
    if required and not _uring["passed"] and _kernel_has_io_uring():
        print("\nno io_uring test passed although this kernel has io_uring")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _kernel_has_io_uring() -> bool:
    from offloadd_native import Uring

    try:
        Uring(4).close()
    except OSError:
        return False
    return True
