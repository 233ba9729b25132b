"""Generate the protobuf stubs in offloadd/wire/pb from proto/, or check that they are up to date (--check).

The generated files are committed, so that installing needs no protoc.
"""

from __future__ import annotations

import filecmp
import shutil
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "offloadd" / "wire" / "pb"
FILES = ("errors", "control", "data")


def generate(into: Path) -> None:
    """Write the stubs for every .proto file into `into`, with imports that work inside the package."""
    import grpc_tools

    well_known = Path(grpc_tools.__file__).parent / "_proto"
    with tempfile.TemporaryDirectory() as scratch:
        code = protoc.main(
            [
                "protoc",
                f"-I{ROOT / 'proto'}",
                f"-I{well_known}",
                f"--python_out={scratch}",
                f"--pyi_out={scratch}",
                f"--grpc_python_out={scratch}",
                *[f"offloadd/v1/{name}.proto" for name in FILES],
            ]
        )
        if code != 0:
            raise SystemExit(f"protoc ended with {code}")
        into.mkdir(parents=True, exist_ok=True)
        (into / "__init__.py").write_text('"""Generated from proto/ by tools/stubs.py; do not edit."""\n')
        for path in sorted((Path(scratch) / "offloadd" / "v1").iterdir()):
            text = path.read_text().replace("from offloadd.v1 import", "from offloadd.wire.pb import")
            (into / path.name).write_text(text)


def main() -> int:
    if "--check" not in sys.argv:
        shutil.rmtree(TARGET, ignore_errors=True)
        generate(TARGET)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        names = sorted(p.name for p in Path(scratch).iterdir())
        stale = [n for n in names if not (TARGET / n).exists() or not filecmp.cmp(TARGET / n, Path(scratch) / n, False)]
    if stale:
        print(f"stale generated stubs: {', '.join(stale)}; run 'make proto'", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
