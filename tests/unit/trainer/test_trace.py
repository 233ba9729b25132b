"""The trace as a hint, and what the policy makes of it."""

from __future__ import annotations

import pytest
from torch import nn

from tests.unit.trainer.test_layout import zeros_of
from trainer.zero.parameter import ParamState, ZeroParam
from trainer.zero.policy import Policy
from trainer.zero.trace import Event, HookedModule, Trace

LARGE = 10**9


@pytest.fixture
def params() -> list[ZeroParam]:
    return zeros_of(10, 20, 30, 40)


@pytest.fixture
def modules(params: list[ZeroParam]) -> list[HookedModule]:
    return [HookedModule(zero.name, nn.Identity(), [zero]) for zero in params]


def run(trace: Trace, order: list[HookedModule], whole: bool = True) -> list[bool]:
    trace.begin()
    held = [trace.note(Event(module, False)) for module in order]
    if whole:
        trace.end()
    return held


def test_the_first_pass_gives_no_hint_and_the_second_follows_it(modules: list[HookedModule]) -> None:
    trace = Trace()
    assert run(trace, modules) == [False] * 4
    assert run(trace, modules) == [True] * 4
    assert trace.settled
    assert trace.invalidations == 0


def test_another_order_turns_the_hint_off_once_and_is_the_next_hint(modules: list[HookedModule]) -> None:
    trace = Trace()
    a, b, c, d = modules
    run(trace, [a, b, c, d])
    assert run(trace, [a, c, b, d]) == [True, False, False, False]
    assert trace.invalidations == 1
    assert run(trace, [a, c, b, d]) == [True] * 4


@pytest.mark.parametrize("order", [[0, 1], [0, 1, 2, 3, 3]])
def test_a_shorter_or_longer_pass_counts_as_a_mismatch(modules: list[HookedModule], order: list[int]) -> None:
    trace = Trace()
    run(trace, modules)
    run(trace, [modules[i] for i in order])
    assert trace.invalidations == 1
    assert not trace.settled


def test_reuse_distance_counts_elements_in_between(modules: list[HookedModule], params: list[ZeroParam]) -> None:
    trace = Trace()
    a, b, c, d = modules
    run(trace, [a, b, c, a, d])
    run(trace, [a], whole=False)
    assert trace.reuse_distance(params[0], LARGE) == 20 + 30
    assert trace.reuse_distance(params[0], 40) == 41
    assert trace.reuse_distance(params[1], LARGE) == 0


def at_start(modules: list[HookedModule]) -> Trace:
    trace = Trace()
    run(trace, modules)
    run(trace, modules[:1], whole=False)
    return trace


@pytest.mark.parametrize(
    ("bucket", "max_live", "names"),
    [
        (0, LARGE, []),
        (1, LARGE, ["p1"]),
        (21, LARGE, ["p1", "p2"]),
        (LARGE, LARGE, ["p1", "p2", "p3"]),
        (LARGE, 10, []),
    ],
)
def test_prefetching_stops_at_the_limits(
    modules: list[HookedModule], bucket: int, max_live: int, names: list[str]
) -> None:
    policy = Policy(bucket, max_live, LARGE)
    assert [zero.name for zero in policy.prefetch(at_start(modules), live=10)] == names


def test_what_is_gathered_already_is_counted_on_and_kept(modules: list[HookedModule], params: list[ZeroParam]) -> None:
    policy, trace = Policy(LARGE, LARGE, 1), at_start(modules)
    params[1].state = ParamState.AVAILABLE
    assert [zero.name for zero in policy.prefetch(trace, live=10)] == ["p2", "p3"]
    assert policy.keep(trace, params[1], live=10)


def test_where_nothing_may_stay_prefetching_ends_at_what_is_gathered(
    modules: list[HookedModule], params: list[ZeroParam]
) -> None:
    params[2].state = ParamState.AVAILABLE
    assert [zero.name for zero in Policy(LARGE, LARGE, 0).prefetch(at_start(modules), live=10)] == ["p1"]


def test_a_distance_of_zero_releases_always(modules: list[HookedModule], params: list[ZeroParam]) -> None:
    assert not Policy(0, LARGE, 0).keep(at_start(modules), params[1], live=0)
    assert Policy(0, LARGE, 1).keep(at_start(modules), params[1], live=0)


def test_above_the_live_limit_nothing_is_kept_for_reuse(modules: list[HookedModule], params: list[ZeroParam]) -> None:
    assert not Policy(0, 5, LARGE).keep(at_start(modules), params[1], live=6)
