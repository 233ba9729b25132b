"""Calibration stays in its bounds, leaves nothing, and survives being stored."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from offloadd.core.errors import OffloadError
from offloadd.core.units import KIB, MIB
from offloadd.io.calibrate import CANDIDATES, Calibration, assumed, calibrate, choose, overridden
from offloadd.io.engine import FileTuning
from offloadd.io.threads import ThreadsEngine


def test_it_keeps_to_its_time_and_leaves_nothing(tmp_path: Path) -> None:
    engine = ThreadsEngine(threads=2)
    started = time.monotonic()
    found = calibrate(engine, str(tmp_path), seconds=0.3, bytes_max=32 * MIB)
    assert time.monotonic() - started < 10
    assert found.tuning() in CANDIDATES
    assert min(found.read_bps, found.write_bps, found.mixed_bps) > 0
    assert os.listdir(tmp_path) == []
    assert engine.inflight() == 0
    engine.close()


def test_too_little_room_is_an_error(tmp_path: Path) -> None:
    engine = ThreadsEngine(threads=1)
    with pytest.raises(OffloadError, match="too little room"):
        calibrate(engine, str(tmp_path), bytes_max=MIB)
    engine.close()


def test_json_brings_it_back() -> None:
    found = Calibration(131072, 32, 2.0e9, 2.3e9, 2.1e9, True, 1.5)
    assert Calibration.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_json_of_something_else_is_refused() -> None:
    with pytest.raises(ValueError, match="not a calibration"):
        Calibration.from_json({"block_bytes": 1})


def test_configured_figures_win_over_measured_ones() -> None:
    found = overridden(assumed(True), block_bytes=0, queue_depth=7)
    assert (found.block_bytes, found.queue_depth) == (MIB, 7)


def test_of_blocks_nearly_as_fast_the_largest_is_chosen() -> None:
    small, large, slow = FileTuning(128 * KIB, 32), FileTuning(MIB, 32), FileTuning(4 * MIB, 8)
    assert choose({small: 2.00e9, large: 1.95e9, slow: 1.2e9}) == large


def test_a_larger_block_that_is_slower_is_not_chosen() -> None:
    small, large = FileTuning(128 * KIB, 32), FileTuning(MIB, 32)
    assert choose({small: 2.0e9, large: 1.5e9}) == small
