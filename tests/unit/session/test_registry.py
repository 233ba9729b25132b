"""Who may open what, and what it costs the budgets."""

import pytest

from offloadd.core.errors import Code, OffloadError
from offloadd.core.units import MIB
from offloadd.session.registry import OpenRequest, Registry


def registry(host: int = 100 * MIB, swap: int = 1000 * MIB, sessions: int = 8) -> Registry:
    return Registry(host, swap, sessions, lambda: 0)


def request(rank: int = 0, job: str = "a", world: int = 2, local: int = 2, host: int = 0, swap: int = 0) -> OpenRequest:
    return OpenRequest(job, "launch", rank, world, local, host, swap, 1.0)


def code_of(error: pytest.ExceptionInfo[OffloadError]) -> Code:
    assert "\n" not in error.value.message
    return error.value.code


def test_a_second_session_of_a_rank_fences_the_first() -> None:
    r = registry()
    first, _ = r.open(request(host=60 * MIB), 0, None)
    second, fenced = r.open(request(host=60 * MIB), 0, None)
    assert fenced is first
    with pytest.raises(OffloadError) as caught:
        r.authenticate(first.id, first.secret)
    assert code_of(caught) is Code.STALE_SESSION
    assert r.authenticate(second.id, second.secret) is second
    assert second.incarnation > first.incarnation


def test_a_wrong_secret_opens_nothing() -> None:
    r = registry()
    session, _ = r.open(request(), 0, None)
    with pytest.raises(OffloadError) as caught:
        r.authenticate(session.id, "0" * 32)
    assert code_of(caught) is Code.BAD_TOKEN


def test_a_job_belongs_to_the_user_that_opened_it() -> None:
    r = registry()
    r.open(request(rank=0), 1000, None)
    with pytest.raises(OffloadError) as caught:
        r.open(request(rank=1), 1001, None)
    assert code_of(caught) is Code.WRONG_USER


def test_a_rank_with_another_world_size_is_refused_with_both_figures() -> None:
    r = registry()
    r.open(request(rank=0, world=2), 0, None)
    with pytest.raises(OffloadError, match=r"2 ranks.*says 4") as caught:
        r.open(request(rank=1, world=4), 0, None)
    assert code_of(caught) is Code.WRONG_WORLD


def test_a_minimum_that_can_never_be_granted_is_refused_at_open_with_figures() -> None:
    r = registry(host=100 * MIB)
    with pytest.raises(OffloadError, match=r"needs 200 MiB .* 100 MiB of 100 MiB are available") as caught:
        r.open(request(host=200 * MIB), 0, None)
    assert code_of(caught) is Code.NO_HOST_BUDGET
    assert not r.jobs


def test_promises_return_when_the_session_is_forgotten() -> None:
    r = registry()
    session, _ = r.open(request(host=60 * MIB, swap=500 * MIB), 0, None)
    assert (r.host.used, r.swap.used) == (60 * MIB, 500 * MIB)
    assert r.forget(session) is session.job
    assert (r.host.used, r.swap.used) == (0, 0)
    assert r.forget(session) is None


def test_the_job_ends_with_its_last_session() -> None:
    r = registry()
    a, _ = r.open(request(rank=0), 0, None)
    b, _ = r.open(request(rank=1), 0, None)
    assert r.forget(a) is None
    assert r.forget(b) is b.job
    assert not r.jobs


def test_unnamed_ranks_of_one_launch_share_a_job_and_other_launches_do_not() -> None:
    r = registry()
    a, _ = r.open(OpenRequest("", "one", 0, 2, 2, 0, 0, 1.0), 0, None)
    b, _ = r.open(OpenRequest("", "one", 1, 2, 2, 0, 0, 1.0), 0, None)
    c, _ = r.open(OpenRequest("", "two", 0, 2, 2, 0, 0, 1.0), 0, None)
    assert a.job is b.job
    assert c.job is not a.job


@pytest.mark.parametrize("name", ["../x", "a/b", ".hidden", "x" * 65, "a b"])
def test_a_job_name_that_could_be_a_path_is_refused(name: str) -> None:
    with pytest.raises(OffloadError) as caught:
        registry().open(request(job=name), 0, None)
    assert code_of(caught) is Code.BAD_REQUEST


def test_sessions_are_bounded() -> None:
    r = registry(sessions=1)
    r.open(request(rank=0), 0, None)
    with pytest.raises(OffloadError, match="sessions_max") as caught:
        r.open(request(rank=1), 0, None)
    assert code_of(caught) is Code.NO_SESSION
