"""Under a small limit on locked memory the engine still works: it only does without registered buffers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from offloadd.io.select import try_driver

PROGRAM = """
import json, resource, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
sys.path.insert(0, sys.argv[3])
from tests.conformance.engines import Rig, UringEngine, open_driver
from offloadd.core.records import Direction
rig = Rig(UringEngine(open_driver(sys.argv[1])), Path(sys.argv[2]))
rig.bytes[:] = 3
both = (Direction.WRITE, Direction.READ)
results = [rig.one(rig.transfer(direction, 0, 100_000, checksum=True)) for direction in both]
statistics = rig.engine.statistics()
rig.close()
print(json.dumps([[o.result for o in results], results[0].checksums == results[1].checksums, statistics]))
"""


@pytest.mark.uring
@pytest.mark.parametrize("driver", ["native", "liburing"])
def test_memory_that_may_not_be_locked_is_used_unregistered(tmp_path: Path, driver: str) -> None:
    trial = try_driver(driver)
    if not trial.ok:
        pytest.skip(f"uring/{driver}: {trial.why}")
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", PROGRAM, driver, str(tmp_path), str(root)]
    if os.geteuid() == 0:  # root's CAP_IPC_LOCK would hide the limit
        if shutil.which("setpriv") is None:
            pytest.skip("root without setpriv(1) cannot shed CAP_IPC_LOCK")
        command = ["setpriv", "--inh-caps=-ipc_lock", "--bounding-set=-ipc_lock", *command]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=root, check=False)
    assert ran.returncode == 0, ran.stderr
    results, checksums_agree, statistics = json.loads(ran.stdout)
    assert results == [102_400, 102_400]
    assert checksums_agree
    assert statistics["unregistered_regions"] == 1
