"""Choosing an engine: what is refused, why, and what follows."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from offloadd.core.errors import ConfigError
from offloadd.io import select
from offloadd.io.select import Trial, choose_engine, explain


def trials(monkeypatch: pytest.MonkeyPatch, **found: Trial) -> None:
    monkeypatch.setattr(select, "try_driver", lambda name: found[name])


DEAD = Trial(False, "its trial died of SIGILL")


def test_auto_falls_back_to_threads_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    trials(monkeypatch, liburing=DEAD, native=Trial(False, "set-up (EPERM)"))
    engine, refusals = choose_engine()
    engine.close()
    assert engine.name == "threads"
    assert [tuple(refusal) for refusal in refusals] == [
        ("uring/liburing", "its trial died of SIGILL"),
        ("uring/native", "set-up (EPERM)"),
    ]


@pytest.mark.uring
def test_auto_takes_native_where_the_package_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    real = select.try_driver("native")
    if not real.ok:
        pytest.skip(f"uring/native: {real.why}")
    trials(monkeypatch, liburing=DEAD, native=real)
    engine, refusals = choose_engine()
    engine.close()
    assert (engine.name, engine.driver, len(refusals)) == ("uring", "native", 1)


def test_an_explicit_choice_that_cannot_run_is_an_error_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    trials(monkeypatch, liburing=DEAD)
    with pytest.raises(ConfigError, match="uring/liburing: its trial died of SIGILL"):
        choose_engine("uring", "liburing")


def test_threads_and_null_need_no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    trials(monkeypatch)
    for name in ("threads", "null"):
        engine, refusals = choose_engine(name)
        engine.close()
        assert (engine.name, refusals) == (name, [])


@pytest.mark.parametrize(
    ("error", "disabled", "words"),
    [
        (errno.EPERM, 2, "io_uring_disabled=2 switches io_uring off for everyone"),
        (errno.EPERM, 0, "seccomp"),
        (errno.ENOSYS, 0, "this kernel"),
        (errno.ENOMEM, 0, "locked memory"),
        (errno.EINVAL, 0, "EINVAL"),
    ],
)
def test_an_errno_is_explained_by_what_decides_it(
    monkeypatch: pytest.MonkeyPatch, error: int, disabled: int, words: str
) -> None:
    monkeypatch.setattr(select, "uring_disabled", lambda: disabled)
    assert words in explain(error, "set-up")


def test_a_package_that_kills_its_process_is_refused_and_not_fatal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    dying = tmp_path / "python"
    dying.write_text("#!/bin/sh\nkill -ILL $$\n")
    dying.chmod(0o755)
    monkeypatch.setattr(select.sys, "executable", str(dying))
    trial = select.try_driver.__wrapped__("liburing")
    assert (trial.ok, trial.why) == (False, "its trial died of SIGILL; the package needs a CPU with AVX-512")
