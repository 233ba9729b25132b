"""Bit for bit the same losses, norms, weights, masters and moments, whatever is offloaded and however many ranks.

The slice that always runs has every model at world 1 and 2 and some at 3 and 4; the whole matrix is marked `full`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from tests.numerics.parity.cells import WAYS, Cell
from tests.numerics.parity.world import WorldResult
from tests.numerics.parity.zoo import ZOO

_IN_PROCESS = ["eager", "mixed"]
_DAEMON = [way for way in WAYS if way.startswith("nvme")]
_FULL = [
    Cell(model, accumulation, clip, bf16)
    for model, accumulation, clip, bf16 in itertools.product(ZOO, (1, 4), (0.0, 0.05), (False, True))
]
_FULL_WIDE = [cell for cell in _FULL if cell.clip and cell.accumulation == (4 if cell.bf16 else 1)]
"""For three and four ranks, which take turns on a small machine: clipping happens alike at every world size."""
SLICE: dict[int, list[Cell]] = {
    1: [Cell(model, 1 + n % 2, 0.05 * (n % 3), False) for n, model in enumerate(ZOO)] + [Cell("plain", 4, 1.0, True)],
    2: [Cell(model, 2 if model == "plain" else 1, 0.05, model in ("plain", "checkpoint")) for model in ZOO],
    3: [Cell("sizes"), Cell("tied", 4, 0.0, True), Cell("checkpoint_reentrant")],
    4: [Cell("shapes", 2, 0.05, True), Cell("borrowing")],
}
DAEMON_SLICE: dict[int, list[Cell]] = {
    1: [Cell("sizes", bf16=True), Cell("tied", 2, 0.05), *(Cell(model, clip=0.0) for model in ZOO)],
    2: [Cell("sizes", clip=0.0), Cell("tied", 2, 0.0, True), Cell("borrowing", 2, 0.05, True)],
    3: [Cell("shapes", 1, 0.05)],
}
Matrix = tuple[dict[int, list[Cell]], list[str]]
MATRICES: dict[str, Matrix] = {
    "slice": (SLICE, _IN_PROCESS),
    "daemon": (DAEMON_SLICE, _DAEMON),
    "full": ({1: _FULL, 2: _FULL, 3: _FULL_WIDE, 4: _FULL_WIDE}, _IN_PROCESS + _DAEMON),
}
WholeWorld = Callable[[int, str], WorldResult]


@pytest.fixture(scope="module")
def whole_world(tmp_path_factory: pytest.TempPathFactory) -> WholeWorld:
    """Each world is spawned once per module and matrix, when the first of its cells is looked at."""
    made: dict[tuple[int, str], WorldResult] = {}

    def get(world: int, matrix: str) -> WorldResult:
        if (world, matrix) not in made:
            cells, ways = MATRICES[matrix]
            made[world, matrix] = WorldResult(world, cells[world], ways, tmp_path_factory.mktemp(f"world{world}"))
        return made[world, matrix]

    return get


def _cases(matrix: str) -> list[object]:
    worlds, ways = MATRICES[matrix]
    return [
        pytest.param(world, cell, way, id=f"{world}-{cell.id}-{way}")
        for world, cells in worlds.items()
        for cell in cells
        for way in ways
        if WAYS[way].suits(cell)
    ]


def _check_bits(result: WorldResult, cell: Cell, way: str) -> None:
    different = {rank: entry[way]["differences"] for rank, entry in enumerate(result.of(cell))}
    assert not any(different.values()), different


@pytest.mark.parametrize(("world", "cell", "way"), _cases("slice"))
def test_releasing_early_changes_no_bit(whole_world: WholeWorld, world: int, cell: Cell, way: str) -> None:
    _check_bits(whole_world(world, "slice"), cell, way)


@pytest.mark.parametrize(("world", "cell", "way"), _cases("daemon"))
def test_a_daemon_changes_no_bit(whole_world: WholeWorld, world: int, cell: Cell, way: str) -> None:
    _check_bits(whole_world(world, "daemon"), cell, way)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(1900)
@pytest.mark.parametrize(("world", "cell", "way"), _cases("full"))
def test_the_whole_matrix_differs_in_no_bit(whole_world: WholeWorld, world: int, cell: Cell, way: str) -> None:
    _check_bits(whole_world(world, "full"), cell, way)


_AGAINST_TORCH = [
    pytest.param(world, cell, id=f"{world}-{cell.id}")
    for world, cells in SLICE.items()
    for cell in cells
    if not cell.bf16 and cell.model != "branching"
]


@pytest.mark.parametrize(("world", "cell"), _AGAINST_TORCH)
def test_training_is_that_of_plain_torch(whole_world: WholeWorld, world: int, cell: Cell) -> None:
    assert whole_world(world, "slice").of(cell)[0]["far_from_plain"] == []


@pytest.mark.parametrize("world", sorted(SLICE))
def test_ranks_agree_on_norms(whole_world: WholeWorld, world: int) -> None:
    result = whole_world(world, "slice")
    for cell in SLICE[world]:
        assert len({tuple(entry["norms"]) for entry in result.of(cell)}) == 1


def test_live_parameter_bytes_fall_back_after_forward(whole_world: WholeWorld) -> None:
    result = whole_world(1, "slice")
    for cell in SLICE[1]:
        live = result.of(cell)[0]["eager"]["live"]
        if cell.model != "penalised":  # Whose gradient was taken in forward and will be differentiated again.
            assert live == [0] * len(live), cell.id


def test_updates_begin_in_backward(whole_world: WholeWorld) -> None:
    early = {
        cell.model: entry["nvme_early"]["statistics"]["early_updates"]
        for cell in DAEMON_SLICE[1]
        if cell.clip == 0.0
        for entry in whole_world(1, "daemon").of(cell)
    }
    assert early["plain"] > 0
    assert early["branching"] == 0, "whose steps do not resemble each other"


def test_no_lease_is_left_open(whole_world: WholeWorld) -> None:
    for world, cells in SLICE.items():
        for cell in cells:
            for entry in whole_world(world, "slice").of(cell):
                assert entry["eager"]["statistics"]["open_leases"] == 0


def test_a_branch_that_alternates_is_counted_and_costs_nothing_else(whole_world: WholeWorld) -> None:
    cell = next(cell for cell in SLICE[1] if cell.model == "branching")
    assert whole_world(1, "slice").of(cell)[0]["eager"]["statistics"]["trace_invalidations"] > 0


def test_gradients_that_come_in_two_parts_are_counted(whole_world: WholeWorld) -> None:
    cell = next(cell for cell in SLICE[3] if cell.model == "checkpoint_reentrant")
    assert all(entry["eager"]["statistics"]["late_gradients"] > 0 for entry in whole_world(3, "slice").of(cell))
