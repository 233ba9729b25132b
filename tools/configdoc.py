"""Generate docs/configuration.md from the configuration classes of daemon and trainer, or check it (--check)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from offloadd.config import Config
from trainer.config import TrainerConfig

TARGET = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"

HEAD = """# Configuration

Generated from the configuration classes by `make docs`; do not edit.

## The daemon

`offloadd serve --config offloadd.toml`. Every key can also be given on the command line (`--io.engine=threads`) or in
the environment (`OFFLOADD_IO_ENGINE=threads`); command line beats environment beats file beats default. Sizes take
units (`512MiB`, `2GB`). An unknown key is an error that names the nearest known one.
"""

TRAINER_HEAD = """
## The trainer

A DeepSpeed-style JSON file or dict. Every key below is known by name and type, at every level; any other is refused
with the nearest known key. What is marked "Not supported yet" may be present with its default, and is refused with any
other value. Both spellings of ZeRO-3's keys (`stage3_X` and `X`) are accepted. `"auto"` is replaced by the default, and
said so, where there is one.

Mistakes end a script with its own line and one sentence. `TRAINER_TRACEBACK=full` in the environment shows the whole
traceback.
"""


def _default(field: FieldInfo) -> str:
    if isinstance(field.default, BaseModel):
        return ""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return "`none`" if value is None else f"`{value}`"


def _model_of(annotation: Any) -> type[BaseModel] | None:
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _rows(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        inner = _model_of(field.annotation)
        if inner is not None and not getattr(inner, "built", True):
            known = ", ".join(f"`{inside.alias or spelling}`" for spelling, inside in inner.model_fields.items())
            yield f"| `{key}` | | Not supported yet: refused if it asks for anything. Known keys: {known}. |"
            continue
        if inner is not None:
            yield from _rows(inner, key + ".")
            continue
        text = " ".join((field.description or "").split())
        yield f"| `{key}` | {_default(field)} | {text} |"


def generate() -> str:
    """The whole document."""
    table = "| key | default | meaning |\n| --- | --- | --- |\n"
    daemon = table + "\n".join(_rows(Config, "")) + "\n"
    trainer = table + "\n".join(_rows(TrainerConfig, "")) + "\n"
    return f"{HEAD}\n{daemon}{TRAINER_HEAD}\n{trainer}"


def main() -> int:
    text = generate()
    if "--check" not in sys.argv:
        TARGET.write_text(text)
        return 0
    if not TARGET.exists() or TARGET.read_text() != text:
        print("docs/configuration.md is stale; run 'make docs'", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
