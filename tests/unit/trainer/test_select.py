"""Which sides share a session with the daemon."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from trainer.config import load_config
from trainer.swap import select
from trainer.swap.select import RankPlace, select_backends

HERE = {"endpoint": "unix:///run/offloadd.sock"}
THERE = {"endpoint": "unix:///run/other.sock"}


@pytest.mark.parametrize(
    ("param", "optimizer", "sessions"),
    [
        (HERE, HERE, 1),
        ({**HERE, "nvme_path": "/a"}, HERE, 1),
        ({**HERE, "nvme_path": "/a"}, {**HERE, "nvme_path": "/b"}, 1),
        (HERE, THERE, 2),
        (HERE, {"nvme_path": "/a"}, 2),
        ({"nvme_path": "/a"}, {"nvme_path": "/a"}, 1),
        ({"nvme_path": "/a"}, {"nvme_path": "/b"}, 2),
    ],
)
def test_sides_at_one_daemon_share_a_session(
    monkeypatch: pytest.MonkeyPatch, param: dict[str, str], optimizer: dict[str, str], sessions: int
) -> None:
    """Two of one rank in a named job would fence each other. With an endpoint, a path says nothing."""
    made: list[Any] = []

    def connect(*arguments: Any) -> Any:
        made.append(SimpleNamespace(close=lambda: None))
        return made[-1]

    monkeypatch.setattr(select, "_connect", connect)
    sides = {"offload_param": {"device": "nvme", **param}, "offload_optimizer": {"device": "nvme", **optimizer}}
    config, _ = load_config({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3, **sides}})
    select_backends(config, RankPlace(0, 1, 0, 1))
    assert len(made) == sessions
