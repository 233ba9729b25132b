"""The daemon's swap paths as a whole: claimed, measured once, and the source of every job's swap files.

Owned by `offloadd.node`. Lends descriptors to the engine under numbers of its own; moves no bytes.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
from dataclasses import dataclass

from offloadd.config import IoConfig, SwapConfig
from offloadd.control.describe import PathFacts
from offloadd.core.errors import ConfigError
from offloadd.core.units import MIB
from offloadd.io.calibrate import Calibration, assumed, calibrate, overridden
from offloadd.io.engine import Engine
from offloadd.io.swapfiles import SwapFiles, SwapPath
from offloadd.session.registry import Job
from offloadd.store.catalog import Catalog
from offloadd.store.placement import SwapTarget

log = logging.getLogger("offloadd.volumes")

CLAIM_SECONDS_MAX = 5.0
"""Longest wait for a daemon that has the path and may be about to end."""

RESERVE_BYTES = 64 * MIB
"""Left free on every path, so that a full disk does not take the rest of the machine with it."""
WINDOW_BYTES_MIN = 8 * MIB


@dataclass(slots=True)
class JobVolumes:
    """One job's swap files, lent to the engine as long as the job lives."""

    files: SwapFiles
    targets: tuple[SwapTarget, ...]
    engine: Engine

    def grow(self, file: int, length: int) -> None:
        index = next(i for i, target in enumerate(self.targets) if target.file == file)
        self.files.grow(index, length)

    def withdraw(self) -> None:
        for target in self.targets:
            self.engine.unregister_file(target.file)

    def remove(self) -> None:
        # Nothing can be resumed yet, so a finished job's files are of no use to anybody.
        self.files.remove()


class Volumes:
    """All paths."""

    def __init__(self, swap: SwapConfig, io: IoConfig, engine: Engine) -> None:
        self._swap = swap
        self._io = io
        self._engine = engine
        self._paths: list[SwapPath] = []
        self._calibrations: list[Calibration] = []
        self._numbers = itertools.count(1)
        self.facts: list[PathFacts] = []

    async def open(self, catalog: Catalog) -> None:
        """Claim and measure every path. OffloadError, one sentence, naming the path."""
        if len(set(map(os.path.realpath, self._swap.paths))) != len(self._swap.paths):
            raise ConfigError(f"swap.paths names a directory twice: {':'.join(self._swap.paths)}")
        for directory in self._swap.paths:
            path = await asyncio.to_thread(SwapPath, directory, CLAIM_SECONDS_MAX)
            self._paths.append(path)
            figures = overridden(await self._measure(path, catalog), self._io.block_bytes, self._io.queue_depth)
            self._calibrations.append(figures)
            self.facts.append(
                PathFacts(
                    directory,
                    path.direct,
                    path.filesystem,
                    figures.block_bytes,
                    figures.queue_depth,
                    figures.read_bps,
                    figures.write_bps,
                    figures.mixed_bps,
                )
            )

    async def _measure(self, path: SwapPath, catalog: Catalog) -> Calibration:
        if self._io.calibrate_seconds == 0 or self._engine.name == "null":
            return assumed(path.direct)
        key = f"{path.directory} {self._engine.name}/{self._engine.driver}"
        stored = await asyncio.wrap_future(catalog.calibration(key))
        if stored is not None:
            try:
                return Calibration.from_json(json.loads(stored))
            except ValueError:
                log.warning("the stored calibration of %s is not readable and is made anew", path.directory)
        figures = await asyncio.to_thread(calibrate, self._engine, path.directory, self._io.calibrate_seconds)
        log.info(
            "path %s: block %d, depth %d, read %.2f GB/s, write %.2f GB/s, mixed %.2f GB/s",
            path.directory,
            figures.block_bytes,
            figures.queue_depth,
            figures.read_bps / 1e9,
            figures.write_bps / 1e9,
            figures.mixed_bps / 1e9,
        )
        await asyncio.wrap_future(catalog.put_calibration(key, json.dumps(figures.to_json())))
        return figures

    def windows(self) -> dict[int, int]:
        """Bytes that may be in flight per path."""
        return {
            index: max(WINDOW_BYTES_MIN, 2 * figures.queue_depth * figures.block_bytes)
            for index, figures in enumerate(self._calibrations)
        }

    def available_bytes(self) -> int:
        """What all sessions together may put on disk."""
        seen: dict[int, int] = {}
        for path in self._paths:
            # Two directories of one file system share its space.
            seen[os.stat(path.directory).st_dev] = max(0, path.free_bytes() - RESERVE_BYTES)
        free = sum(seen.values())
        return min(free, self._swap.limit_bytes) if self._swap.limit_bytes else free

    async def open_job(self, job: Job) -> JobVolumes:
        """The job's swap files, registered with the engine. Opening one may wait for the disk."""
        files = await asyncio.to_thread(SwapFiles, self._paths, job.name if job.named else None)
        targets = []
        for index, (file, figures) in enumerate(zip(files.files, self._calibrations, strict=True)):
            number = next(self._numbers)
            self._engine.register_file(number, file.fd, figures.tuning())
            targets.append(SwapTarget(number, index, max(1.0, figures.mixed_bps)))
        return JobVolumes(files, tuple(targets), self._engine)

    def close(self) -> None:
        for path in self._paths:
            path.close()
        self._paths = []
