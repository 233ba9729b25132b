"""What a script's author sees of a mistake: their own lines and one sentence."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

import trainer
from offloadd.core.errors import Code, OffloadError
from tests.daemon import ROOT
from tests.unit.trainer.making import config_of, engine_of
from trainer.boundary import VARIABLE, user_facing

SCRIPT = """
import torch
from torch import nn
import trainer
from tests.unit.trainer.making import config_of

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)
    def forward(self, x):
        return self.lin(x).sum()

def start(zero=None, **more):
    model = Net()
    return trainer.initialize(model=model, config=config_of(zero, **more)).engine

x = torch.ones(1, 4)
"""

MISTAKES = {
    "start(optimiser={})  # mine": "unknown key optimiser",
    "start(offloadd={'timeout_s': float('nan')})  # mine": "timeout_s",
    "start(zero={'offload_param': {'device': 'nvme', 'endpoint': 'unix:///nowhere'}})  # mine": "no socket /nowhere",
    "start().module.lin.weight.add_(1)  # mine": "of which this rank holds a shard only",
    "e = start(); e.backward(e(x)); e.backward(e(x))  # mine": "call engine.step()",
    "e = start(); e.close(); e(x)  # mine": "the engine is closed",
    "m = start().module\\nwith trainer.zero.GatheredParameters(m):  # mine\\n  nn.init.zeros_(m.lin.weight)": "is lost",
    "with trainer.zero.Init(): nn.Linear(3, 3, device='meta')  # mine": "device meta",
}


def complaint(tmp_path: Path, last: str, **environment: str) -> list[str]:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT + last.replace("\\n", "\n") + "\n")
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, env=env, cwd=tmp_path)
    assert done.returncode == 1
    return [line for line in done.stderr.splitlines() if set(line.strip()) - set("^~")]


@pytest.mark.parametrize("last", MISTAKES)
def test_a_mistake_costs_the_scripts_lines_and_one_sentence(tmp_path: Path, last: str) -> None:
    lines = complaint(tmp_path, last)
    assert MISTAKES[last] in lines[-1]
    assert lines[0] == "Traceback (most recent call last):"
    assert any("# mine" in line for line in lines)
    ours = [line for line in lines if line.startswith("  File ") and "train.py" not in line]
    assert len(ours) == 1
    assert "boundary.py" in ours[0]
    assert len(lines) <= 8


def test_everything_is_shown_on_request(tmp_path: Path) -> None:
    last = next(iter(MISTAKES))
    lines = complaint(tmp_path, last, **{VARIABLE: "full"})
    assert MISTAKES[last] in lines[-1]
    assert any("load.py" in line for line in lines)


def frames(error: BaseException) -> list[str]:
    found, trace = [], error.__traceback__
    while trace is not None:
        found.append(trace.tb_frame.f_code.co_name)
        trace = trace.tb_next
    return found


def test_what_the_script_was_handling_stays_in_sight() -> None:
    def script() -> None:
        try:
            raise KeyError("the script's own")
        except KeyError:
            trainer.initialize(model=nn.Linear(2, 2), config={"zero_optimization": {"stage": 2}})

    with pytest.raises(trainer.ConfigError) as caught:
        script()
    assert isinstance(caught.value.__context__, KeyError)
    assert not caught.value.__suppress_context__
    assert frames(caught.value)[1:] == ["script", "call"]


def test_the_line_in_forward_is_the_scripts() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, other: nn.Module) -> object:
            return other.weight + 1

    with (
        engine_of(nn.Linear(2, 2)) as other,
        engine_of(Net()) as engine,
        pytest.raises(trainer.zero.UsageError) as caught,
    ):
        engine(other.module)
    assert frames(caught.value)[1:] == ["call", "forward"]


def _bug() -> None:
    try:
        raise OffloadError(Code.INTERNAL, "ours")
    except OffloadError as error:
        raise trainer.SwapError("ours") from error


def _assertion() -> None:
    raise AssertionError("ours")


@pytest.mark.parametrize(("act", "kind"), [(_bug, trainer.SwapError), (_assertion, AssertionError)])
def test_a_bug_keeps_its_whole_traceback(monkeypatch: pytest.MonkeyPatch, act: object, kind: type[Exception]) -> None:
    monkeypatch.setitem(_bug.__globals__, "__name__", "trainer.somewhere")
    with pytest.raises(kind) as caught:
        user_facing(act)()  # type: ignore[arg-type]
    assert frames(caught.value)[-1] == act.__name__  # type: ignore[attr-defined]
    assert isinstance(caught.value.__cause__, OffloadError) is (act is _bug)


def test_a_configuration_for_init_is_checked_at_the_same_boundary() -> None:
    with pytest.raises(trainer.ConfigError) as caught:
        trainer.zero.Init(config=config_of(nonsense=1))
    assert frames(caught.value)[1:] == ["call"]
