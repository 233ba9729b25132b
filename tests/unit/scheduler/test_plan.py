"""The access plan: positions, out-of-order fetches, wrong guesses."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from offloadd.core.records import TileKey
from offloadd.scheduler.plan import LOOKAHEAD, NO_USE, AccessPlan


def keys(*numbers: int) -> list[TileKey]:
    return [TileKey(1, n) for n in numbers]


@given(st.lists(st.integers(0, 6), min_size=1, max_size=20), st.integers(0, 60))
def test_next_use_is_the_first_position_from_the_cursor_on(numbers: list[int], moves: int) -> None:
    plan = AccessPlan(keys(*numbers))
    for _ in range(moves):
        plan.advance(plan.at(plan.cursor))
    assert plan.cursor == moves
    for key in keys(*range(7)):
        following = [p for p in range(moves, moves + len(numbers)) if plan.at(p) == key]
        assert plan.next_use(key) == (following[0] if following else NO_USE)


def test_fetches_slightly_out_of_order_follow_the_plan() -> None:
    plan = AccessPlan(keys(*range(10)))
    assert all(plan.advance(key) for key in keys(1, 0, 3, 2))
    assert plan.mispredictions == 0
    assert plan.cursor == 4


def test_a_jumped_over_tile_is_still_expected_soon() -> None:
    plan = AccessPlan(keys(*range(10)))
    plan.advance(TileKey(1, 2))
    assert plan.next_use(TileKey(1, 1)) == 1
    assert plan.next_use(TileKey(1, 2)) == 12


def test_a_tile_outside_the_plan_is_a_misprediction_and_moves_nothing() -> None:
    plan = AccessPlan(keys(*range(10)))
    assert not plan.advance(TileKey(9, 9))
    assert (plan.cursor, plan.mispredictions) == (0, 1)


def test_a_jump_beyond_the_lookahead_is_a_misprediction() -> None:
    plan = AccessPlan(keys(*range(3 * LOOKAHEAD)))
    assert not plan.advance(TileKey(1, LOOKAHEAD + 1))


def test_without_a_plan_nothing_is_mispredicted() -> None:
    assert AccessPlan(()).advance(TileKey(1, 1))
