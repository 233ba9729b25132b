"""What a failed request is explained with."""

from __future__ import annotations

from errno import EIO, ENOSPC

import pytest

from offloadd.client.failure import explain
from offloadd.core.errors import Code
from offloadd.core.records import CATALOG_PATH, Op
from offloadd.wire.layout import Completion


def said(code: Code, errno: int, path: int) -> str:
    completion = Completion(1, code, errno, 0, 0, 0, 0, path, 0, 0)
    return explain("job j rank 0", Op.FLUSH, "everything", completion, ["/mnt/a", "/mnt/b"], [], []).message


def test_a_path_that_failed_is_named() -> None:
    assert "/mnt/b reports Input/output error" in said(Code.IO_ERROR, EIO, 1)


@pytest.mark.parametrize(("code", "errno"), [(Code.IO_ERROR, EIO), (Code.NO_SPACE, ENOSPC)])
def test_a_catalog_that_failed_is_not_taken_for_a_path(code: Code, errno: int) -> None:
    text = said(code, errno, CATALOG_PATH)
    assert "catalog could not be written" in text
    assert "/mnt" not in text
