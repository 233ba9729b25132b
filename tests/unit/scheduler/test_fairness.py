"""Sharing: by bytes and weight, without starvation, inside windows."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from offloadd.core.records import TileKey, TrafficClass
from offloadd.scheduler.plan import AccessPlan
from offloadd.scheduler.queues import Want
from offloadd.scheduler.scheduler import STARVATION_BYTES, Scheduler

MIB = 1 << 20


def serve(scheduler: Scheduler, count: int, klass: TrafficClass = TrafficClass.DEMAND) -> Counter[int]:
    served: Counter[int] = Counter()
    for _ in range(count):
        pick = scheduler.pick()
        assert pick is not None
        assert pick.want is not None
        scheduler.started(pick.queue, klass, pick.want.path, pick.want.length)
        scheduler.settled(pick.want.path, pick.want.length)
        served[pick.queue.session] += pick.want.length
    return served


def demand(scheduler: Scheduler, session: int, length: int, count: int, path: int = 0) -> None:
    for index in range(count):
        scheduler.want(session, Want(TileKey(session, index), path, length, False, index))


@settings(max_examples=30)
@given(st.lists(st.tuples(st.sampled_from([1.0, 2.0, 5.0]), st.integers(1, 8)), min_size=2, max_size=5))
def test_bytes_are_shared_in_proportion_to_weight(sessions: list[tuple[float, int]]) -> None:
    scheduler = Scheduler({0: 1 << 40})
    for session, (weight, size) in enumerate(sessions):
        scheduler.open_session(session, weight)
        demand(scheduler, session, size * MIB, 600)
    served = serve(scheduler, 300)
    shares = [served[s] / weight for s, (weight, _) in enumerate(sessions)]
    # Start-time fair queueing: two backlogged sessions differ by at most one transfer of each, over their weights.
    largest = [size * MIB / weight for weight, size in sessions]
    assert max(shares) - min(shares) <= 2 * max(largest) + 1


def test_a_session_that_idled_has_saved_up_nothing() -> None:
    scheduler = Scheduler({0: 1 << 40})
    for session in (1, 2):
        scheduler.open_session(session)
    demand(scheduler, 1, MIB, 200)
    serve(scheduler, 100)
    demand(scheduler, 2, MIB, 200)
    served = serve(scheduler, 40)
    assert abs(served[1] - served[2]) <= MIB


def test_demand_goes_before_prefetch() -> None:
    scheduler = Scheduler({})
    queue = scheduler.open_session(1)
    scheduler.follow(1, AccessPlan([TileKey(1, 5)]))
    demand(scheduler, 1, MIB, 1)
    first, second = scheduler.pick(), scheduler.pick()
    assert first is not None
    assert second is not None
    assert (first.klass, second.klass) == (TrafficClass.DEMAND, TrafficClass.PREFETCH)
    assert second.queue is queue


def test_a_full_window_stops_its_path_only() -> None:
    scheduler = Scheduler({0: MIB, 1: MIB})
    queue = scheduler.open_session(1)
    demand(scheduler, 1, MIB, 1, path=0)
    demand(scheduler, 1, MIB, 1, path=1)
    scheduler.started(queue, TrafficClass.DEMAND, 0, MIB)
    pick = scheduler.pick()
    assert pick is not None
    assert pick.want is not None
    assert pick.want.path == 1
    assert scheduler.pick() is None


def test_a_transfer_larger_than_the_window_goes_alone() -> None:
    scheduler = Scheduler({0: MIB})
    scheduler.open_session(1)
    demand(scheduler, 1, 4 * MIB, 1)
    assert scheduler.pick() is not None


def test_write_back_is_passed_over_for_a_bounded_number_of_bytes() -> None:
    scheduler = Scheduler({0: 1 << 40})
    queue = scheduler.open_session(1)
    queue.allow_write_back(MIB, MIB)
    demand(scheduler, 1, MIB, 200)
    passed = 0
    while (pick := scheduler.pick()) is not None and pick.klass is TrafficClass.DEMAND:
        scheduler.started(pick.queue, TrafficClass.DEMAND, 0, MIB)
        passed += MIB
    assert passed == STARVATION_BYTES


def test_spills_that_are_waited_for_go_before_loads() -> None:
    scheduler = Scheduler({})
    queue = scheduler.open_session(1)
    demand(scheduler, 1, MIB, 1)
    queue.push(Want(TileKey(1, 9), 0, MIB, True, 100))
    pick = scheduler.pick()
    assert pick is not None
    assert pick.want is not None
    assert pick.want.spill


def test_what_waits_for_a_window_is_not_offered_until_all_it_needs_is_there() -> None:
    scheduler = Scheduler({0: 4 * MIB})
    queue = scheduler.open_session(1)
    scheduler.follow(1, AccessPlan([TileKey(1, 0)]))
    scheduler.started(queue, TrafficClass.DEMAND, 0, 2 * MIB)
    queue.prefetch_needs = (0, 3 * MIB)
    assert scheduler.pick() is None
    scheduler.settled(0, 2 * MIB)
    assert scheduler.pick() is not None
