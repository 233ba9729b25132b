"""One client's load: fetch and hand back tiles along a plan. Driven over stdin and stdout, one JSON line each.

`python -m offloadd.ctl.bench.client ENDPOINT RANK CLIENTS BYTES HOST_BYTES`, then lines {"mode": ..., "seconds": ...}.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque

from offloadd.client import ClientSession, Mode, RegisteredShard, ShardSpec, connect

JOB = "bench"
PENDING = 8
"""Fetches under way at a time: as many as a training step keeps."""
MODES = {"read": Mode.READ, "write": Mode.OVERWRITE, "mixed": Mode.UPDATE}


def run(session: ClientSession, shard: RegisteredShard, mode: str, seconds: float, start: int) -> tuple[int, int]:
    """Go round the tiles from `start` until the time is up; (tiles handled, next tile)."""
    pending = deque(session.fetch(shard, (start + i) % len(shard.tiles), MODES[mode]) for i in range(PENDING))
    handled, tile = 0, start + PENDING
    deadline = time.monotonic() + seconds
    while pending:
        slot = pending.popleft().wait()
        if mode == "read":
            slot.release()
        else:
            slot.store()
        handled += 1
        if time.monotonic() < deadline:
            pending.append(session.fetch(shard, tile % len(shard.tiles), MODES[mode]))
            tile += 1
    return handled, tile % len(shard.tiles)


def main() -> None:
    endpoint, rank, clients, length, host_bytes = sys.argv[1], *map(int, sys.argv[2:6])
    session = connect(endpoint, job=JOB, rank=rank, world_size=clients, local_world_size=clients)
    session.reserve(host_bytes=host_bytes, pinned_tiles=PENDING)
    shard = session.register([ShardSpec("bench", "uint8", length, "other")])[0]
    for tile in range(len(shard.tiles)):
        session.fetch(shard, tile, Mode.OVERWRITE).wait().store()
    session.flush()
    print(json.dumps({"tile_bytes": session.tile_bytes, "tiles": len(shard.tiles)}), flush=True)
    position = 0
    for line in sys.stdin:
        task = json.loads(line)
        session.plan([(shard.number, tile, MODES[task["mode"]]) for tile in range(len(shard.tiles))])
        before = session.statistics()
        started = time.monotonic()
        handled, position = run(session, shard, task["mode"], task["seconds"], position)
        seconds = time.monotonic() - started
        after = session.statistics()
        moved = {key: after[key] - before[key] for key in ("disk_read_bytes", "disk_written_bytes")}
        print(json.dumps({"seconds": seconds, "tiles": handled, **moved}), flush=True)
        if task["mode"] != "read":
            session.flush()
    session.close()


if __name__ == "__main__":
    main()
