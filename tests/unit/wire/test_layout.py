"""Entries survive the trip through bytes, and strange bytes are refused or read as what they are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offloadd.core.errors import Code
from offloadd.core.records import Reply
from offloadd.wire.layout import (
    ENTRY_BYTES,
    Submission,
    pack_reply,
    pack_submission,
    unpack_completions,
    unpack_submissions,
)

u16, u32, u64 = (st.integers(0, 2**bits - 1) for bits in (16, 32, 64))


@given(st.builds(Submission, u64, u16, u16, u32, u32, u32, u64, u64, u32))
def test_a_submission_comes_back_as_it_was(entry: Submission) -> None:
    raw = pack_submission(entry)
    assert len(raw) == ENTRY_BYTES
    assert unpack_submissions(raw * 2) == [entry, entry]


@given(u64, st.sampled_from(list(Code)), u64, u64, u64, u32, u32, u64, u32)
def test_a_reply_comes_back_as_it_was(
    number: int, code: Code, offset: int, length: int, lease: int, granule: int, path: int, waited: int, cause: int
) -> None:
    reply = Reply(1, number, code, offset, length, lease, 5, granule, path, waited, cause)
    got = unpack_completions(pack_reply(reply))[0]
    assert got == (number, code, 5, offset, length, lease, granule, path, waited, cause)


def test_half_an_entry_is_refused() -> None:
    with pytest.raises(ValueError, match="whole number"):
        unpack_submissions(bytes(ENTRY_BYTES + 1))
