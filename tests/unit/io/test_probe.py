"""Doctor's findings: one per fact, and a fix wherever something is wrong."""

from __future__ import annotations

from pathlib import Path

from offloadd.io.probe import probe


def test_every_problem_has_a_fix_and_every_status_is_known(tmp_path: Path) -> None:
    findings = probe([str(tmp_path)])
    assert {finding.status for finding in findings} <= {"ok", "warn", "fail"}
    assert not [f for f in findings if f.status == "fail" and not f.fix]


def test_a_good_path_has_no_failure(tmp_path: Path) -> None:
    assert not [f for f in probe([str(tmp_path)]) if f.name.startswith(str(tmp_path)) and f.status == "fail"]


def test_a_missing_path_fails(tmp_path: Path) -> None:
    (finding,) = [f for f in probe([str(tmp_path / "no")]) if f.name.endswith("/no")]
    assert (finding.status, finding.fix) == ("fail", f"mkdir -p {tmp_path}/no")
