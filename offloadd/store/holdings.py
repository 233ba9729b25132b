"""What one session owns: its arena, its shards, its extents and its budget; and how shards are registered.

Used by the store's facade. Registration is all or none: `prepare` allocates extents and says how long the swap files
must become, the control room makes them so (a slow call, off the loop), then `commit` or `abort`. No extent is
allocated later, so a step never fails for want of swap.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass

from offloadd.core.errors import Code, OffloadError
from offloadd.core.records import Extent, ShardSpec, TileKey
from offloadd.core.units import PAGE_BYTES, REGISTRATION_CHUNK_BYTES, align_up, human
from offloadd.store.allocator import ExtentAllocator
from offloadd.store.arena import Arena
from offloadd.store.catalog import ShardRow, TileRow
from offloadd.store.placement import Placement, SwapTarget
from offloadd.store.residency import Lease, Shard, Tile

ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "fp32": 4, "fp16": 2, "bf16": 2}


TILE_BYTES_MIN = 16 << 10
"""A shard's own tile size, if it asks for one: the daemon keeps a record per tile."""
TILES_MAX = 1 << 17
"""Tiles of one session. What is done to all of them at once (marking for a flush) takes some 20 ms."""
SLICE_TILES = 4096
"""Tiles made, spilled or given back before others get a turn: 20 ms at most."""


@dataclass(frozen=True, slots=True)
class SessionTerms:
    """What a session was granted when it opened."""

    job: str
    rank: int
    region: int
    region_bytes: int
    tile_bytes: int
    swap_bytes: int
    files: tuple[SwapTarget, ...]
    weight: float

    def check(self) -> None:
        """OffloadError BAD_REQUEST when the terms contradict themselves."""
        who = f"job {self.job} rank {self.rank}: open"
        limit = min(self.region_bytes, REGISTRATION_CHUNK_BYTES)
        if self.tile_bytes <= 0 or self.tile_bytes % PAGE_BYTES or self.tile_bytes > limit:
            raise OffloadError(
                Code.BAD_REQUEST,
                f"{who}: tile of {self.tile_bytes} bytes; it must be a multiple of {PAGE_BYTES}, "
                f"above 0 and at most {human(limit)}",
            )
        if not self.weight > 0 or self.swap_bytes < 0:
            raise OffloadError(Code.BAD_REQUEST, f"{who}: weight {self.weight}, swap {self.swap_bytes} bytes")


@dataclass(frozen=True, slots=True)
class Registration:
    """A registration between prepare and commit."""

    session: int
    shards: tuple[int, ...]
    """Daemon-wide shard numbers, in the order of the specs."""
    grow: dict[int, int]
    """File number to the length in bytes that the caller must give it before committing."""
    prepared: tuple[Shard, ...]
    """An empty shard has one empty tile."""
    swap_bytes: int
    """Bytes of swap that this registration takes."""


class Holdings:
    """One session."""

    def __init__(self, session: int, terms: SessionTerms, arena: Arena) -> None:
        self.session = session
        self.terms = terms
        self.arena = arena
        self.placement = Placement(terms.files)
        self.shards: list[Shard] = []
        self.pending: dict[tuple[int, ...], Registration] = {}
        """Registrations between prepare and commit, by their shard numbers."""
        self.names: set[str] = set()
        self.swap_used = 0
        self.memory_only = 0
        self.largest_tile = 0
        self.leases: dict[int, Lease] = {}
        self.ended = False
        self.writes: dict[int, int] = {}
        """Per file: spills that reached it."""
        self.synced: dict[int, int] = {}
        """Per file: how many of those a successful sync covers."""
        self.changed: set[int] = set()
        """Shards whose extents changed since the catalog last heard of them."""
        self.spill_error: tuple[Code, int, int] | None = None
        """(code, errno, path) of a spill that failed, until a flush reports it."""
        self._elements: Counter[str] = Counter()
        """Of the registered shards, by kind."""

    @property
    def parameters(self) -> int:
        """Elements of the master copies; of the parameters where there are none."""
        return self._elements["master"] or self._elements["param"]

    @property
    def leased_bytes(self) -> int:
        """Bytes in slots that are lent out."""
        return sum(tile.padded for tile in {lease.tile for lease in self.leases.values()})

    def prepare(
        self, specs: Sequence[ShardSpec], first: int, files: dict[int, ExtentAllocator]
    ) -> Generator[None, None, Registration]:
        """Allocate for `specs`; numbers start at `first`. Raises OffloadError and changes nothing if it cannot, or if
        the session ends meanwhile. Yields now and then, so that whoever drives it can let others have a turn; one at a
        time per session."""
        yield from self._check(specs)
        shards: list[Shard] = []
        made = 0
        try:
            for number, spec in enumerate(specs, first):
                tiles: list[Tile] = []
                shards.append(Shard(number, self.session, spec, tiles))
                for index, length in enumerate(self._lengths(spec)):
                    made += 1
                    if made % SLICE_TILES == 0:
                        yield
                        self._check_open()
                    tiles.append(self._tile(TileKey(number, index), spec, length, files))
        except Exception:
            yield from self._return(shards, files)
            raise
        self.names.update(spec.name for spec in specs)
        used = sum(self._padded(spec) for spec in specs if spec.on_disk)
        self.swap_used += used
        self.memory_only += sum(self._padded(spec) for spec in specs if not spec.on_disk)
        self.largest_tile = max([self.largest_tile] + [shard.tiles[0].padded for shard in shards])
        grow = {f: files[f].end for f in self.placement_files if files[f].end > files[f].granted_length}
        registration = Registration(
            session=self.session,
            shards=tuple(shard.id for shard in shards),
            grow=grow,
            prepared=tuple(shards),
            swap_bytes=used,
        )
        self.pending[registration.shards] = registration
        return registration

    @property
    def placement_files(self) -> list[int]:
        """Numbers of the files that this session may use."""
        return [target.file for target in self.terms.files]

    def commit(self, registration: Registration, files: dict[int, ExtentAllocator]) -> None:
        """The files are long enough; the shards exist from now on."""
        for file, length in registration.grow.items():
            files[file].granted_length = max(files[file].granted_length, length)
        del self.pending[registration.shards]
        self.shards.extend(registration.prepared)
        self.changed.update(registration.shards)
        for shard in registration.prepared:
            self._elements[shard.spec.kind] += shard.spec.length // ITEM_BYTES.get(shard.spec.dtype, 4)

    def abort(self, registration: Registration, files: dict[int, ExtentAllocator]) -> Generator[None, None, None]:
        """Give back what `prepare` took, in slices."""
        if self.pending.pop(registration.shards, None) is None:
            return
        for shard in registration.prepared:
            self.names.discard(shard.spec.name)
            if not shard.spec.on_disk:
                self.memory_only -= self._padded(shard.spec)
        self.swap_used -= registration.swap_bytes
        yield from self._return(list(registration.prepared), files)

    def _return(self, shards: list[Shard], files: dict[int, ExtentAllocator]) -> Generator[None, None, None]:
        """Take back what was placed for tiles that will not be."""
        for extents in _unmade(shards):
            for extent in extents:
                self.placement.undo(extent.file, extent.length)
            _give(extents, files)
            yield

    def _check_open(self) -> None:
        if self.ended:
            who = f"job {self.terms.job} rank {self.terms.rank}"
            raise OffloadError(Code.STALE_SESSION, f"{who}: the session ended while it registered; open a new session")

    def give_back(self, files: dict[int, ExtentAllocator]) -> Generator[None, None, None]:
        """The session ends: free its extents, in slices. Unmakes its records, too, which takes as long as freeing."""
        self.ended = True
        for registration in list(self.pending.values()):
            yield from self.abort(registration, files)
        yield from self.arena.give_back(SLICE_TILES)
        for extents in _unmade(self.shards):
            _give(extents, files)
            yield

    def unsynced(self) -> list[int]:
        """Files with spills that no sync covers yet."""
        return [file for file, count in self.writes.items() if count > self.synced.get(file, 0)]

    def _step(self, spec: ShardSpec) -> int:
        """Bytes of each tile but the last."""
        return spec.tile_bytes or self.terms.tile_bytes

    def new_row(self, shard: Shard) -> ShardRow:
        """A shard as the catalog keeps it before anything was stored. Any thread: what it reads never changes."""
        tiles = [TileRow(t.extent, t.path, t.length, None) for t in shard.tiles]
        return ShardRow(shard.spec, self.terms.tile_bytes, shard.version, tiles)

    def row(self, shard: Shard) -> ShardRow:
        """A shard as the catalog keeps it. Any thread: a tile's checksums are one object, there or not."""
        tiles = [TileRow(t.extent, t.path, t.length, t.disk_checksums) for t in shard.tiles]
        return ShardRow(shard.spec, self.terms.tile_bytes, shard.version, tiles)

    def _lengths(self, spec: ShardSpec) -> list[int]:
        step = self._step(spec)
        return [min(step, spec.length - at) for at in range(0, spec.length, step)] or [0]

    def _tile(self, key: TileKey, spec: ShardSpec, length: int, files: dict[int, ExtentAllocator]) -> Tile:
        extent, path = None, 0
        padded = align_up(length, PAGE_BYTES)
        if spec.on_disk and padded:
            target = self.placement.choose(padded)
            extent = Extent(target.file, files[target.file].take(padded), padded)
            path = target.path
        return Tile(key, self.session, length, extent, path)

    def _check(self, specs: Sequence[ShardSpec]) -> Generator[None, None, None]:
        names = [spec.name for spec in specs]
        who = f"job {self.terms.job} rank {self.terms.rank}"
        if len(set(names)) != len(names) or not self.names.isdisjoint(names):
            twice = sorted(name for name, count in Counter(names).items() if count > 1 or name in self.names)
            raise OffloadError(Code.BAD_REQUEST, f"{who}: register: shard name {twice[0]!r} is already in use")
        yield
        for spec in specs:
            if spec.length < 0:
                raise OffloadError(Code.BAD_REQUEST, f"{who}: register: shard {spec.name!r} has length {spec.length}")
            least = min(TILE_BYTES_MIN, self.terms.tile_bytes)
            if spec.tile_bytes and not least <= spec.tile_bytes <= self.terms.tile_bytes:
                raise OffloadError(
                    Code.BAD_REQUEST,
                    f"{who}: register: shard {spec.name!r} asks for tiles of {spec.tile_bytes} bytes, "
                    f"which must be between {least} and the session's {self.terms.tile_bytes}",
                )
        tiles = sum(-(-spec.length // self._step(spec)) for spec in specs) + sum(len(s.tiles) for s in self.shards)
        if tiles > TILES_MAX:
            raise OffloadError(
                Code.BAD_REQUEST,
                f"{who}: register: {tiles} tiles in all, {TILES_MAX} at most; use larger tiles (more host memory) or "
                "more ranks",
            )
        yield
        self._check_swap(specs, who)
        yield
        self._check_open()
        pinned, largest = self.memory_only, self.largest_tile
        for spec in specs:
            if spec.on_disk:
                largest = max(largest, align_up(min(self._step(spec), spec.length), PAGE_BYTES))
            else:
                pinned += self._padded(spec)
        if pinned + largest > self.arena.slots.bytes:
            raise OffloadError(
                Code.NO_HOST_BUDGET,
                f"{who}: register: {human(pinned)} that stay in memory and one tile of {human(largest)} are needed, "
                f"{human(self.arena.slots.bytes)} are available; give the session more pinned memory",
            )

    def _check_swap(self, specs: Sequence[ShardSpec], who: str) -> None:
        needed = sum(self._padded(spec) for spec in specs if spec.on_disk)
        available = self.terms.swap_bytes - self.swap_used
        if needed > available:
            raise OffloadError(
                Code.NO_SWAP_BUDGET,
                f"{who}: register: {human(needed)} of swap needed, {human(available)} available "
                f"({needed} and {available} bytes); give the session more swap or register less",
            )
        if needed and not self.terms.files:
            raise OffloadError(Code.NO_SWAP_BUDGET, f"{who}: register: no swap file; add a swap path")

    def _padded(self, spec: ShardSpec) -> int:
        """Bytes of a shard with every tile padded to pages."""
        step = self._step(spec)
        whole, rest = divmod(spec.length, step)
        return whole * align_up(step, PAGE_BYTES) + align_up(rest, PAGE_BYTES)


def _unmade(shards: list[Shard]) -> Generator[list[Extent], None, None]:
    """Takes the shards apart from the end, so that no large piece dies at once; yields the extents of a slice."""
    extents: list[Extent] = []
    left = SLICE_TILES
    while shards:
        tiles = shards[-1].tiles
        extents += [tile.extent for tile in tiles[-left:] if tile.extent is not None]
        taken = min(left, len(tiles))
        del tiles[len(tiles) - taken :]
        left -= taken
        if not tiles:
            shards.pop()
        if not left or not shards:
            yield extents
            extents, left = [], SLICE_TILES


def _give(extents: Iterable[Extent], files: dict[int, ExtentAllocator]) -> None:
    """Free extents, neighbours together: a session's lie side by side as a rule, and may be very many."""
    by_file: dict[int, list[tuple[int, int]]] = {}
    for file, offset, length in extents:
        if file in files:
            by_file.setdefault(file, []).append((offset, offset + length))
    for file, spans in by_file.items():
        spans.sort()
        start, end = spans[0]
        for begin, stop in spans[1:]:
            if begin != end:
                files[file].give(start, end - start)
                start = begin
            end = stop
        files[file].give(start, end - start)
