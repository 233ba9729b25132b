"""Metric names are an interface: dashboards and alerts hang on them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from offloadd.telemetry.collectors import DaemonCollector, render
from tests.pump_world import PAGE, World

GOLDEN = Path(__file__).with_name("metrics.golden")


@dataclass(frozen=True)
class Facts:
    version: str = "1"
    started_ns: int = 0


def busy() -> World:
    world = World()
    rank = world.open(region_bytes=2 * PAGE)
    (tiles,) = world.register(1, 4 * PAGE)
    for tile in tiles:
        rank.put(tile, bytes(PAGE))
    rank.get(tiles[0])
    world.engine.fault = lambda transfer: -5
    rank.fetch(tiles[1])
    return world


def test_names_and_labels_are_those_of_the_golden_file() -> None:
    families = text_string_to_metric_families(render(busy().pump.snapshot(), Facts()).decode())
    found = "".join(
        f"{f.name} {f.type} {','.join(sorted({k for s in f.samples for k in s.labels} - {'le'}))}\n" for f in families
    )
    assert found == GOLDEN.read_text()


def test_registering_collects_nothing() -> None:
    def never() -> None:
        raise AssertionError("collected")

    assert list(DaemonCollector(never, Facts()).describe()) == []  # type: ignore[arg-type]


def test_histogram_buckets_are_cumulative_and_end_at_the_count() -> None:
    families = text_string_to_metric_families(render(busy().pump.snapshot(), Facts()).decode())
    duration = next(f for f in families if f.name == "offloadd_io_duration_seconds")
    buckets = [s.value for s in duration.samples if s.name.endswith("_bucket") and s.labels["op"] == "write"][:20]
    assert buckets == sorted(buckets)
    assert buckets[-1] > 0


def test_bytes_written_to_a_path_are_what_the_engine_wrote() -> None:
    world = busy()
    written = sum(p.bytes_written for p in world.pump.snapshot().paths)
    assert written == sum(t.span.length for t in world.engine.log if t.direction == 1)
