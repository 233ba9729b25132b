"""What an operator sees: metrics, probes, gRPC health and reflection, offloadctl."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from offloadd.client import Mode, ShardSpec
from offloadd.core.units import KIB, MIB
from tests.daemon import ROOT, Daemon, running, until


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running() as started:
        yield started


def ctl(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "offloadd.ctl.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, check=False)


def read(daemon: Daemon, path: str) -> tuple[int, str]:
    base = str(daemon.status()["metrics"]).removesuffix("/metrics")
    try:
        with urllib.request.urlopen(base + path, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.parametrize("path", ["/livez", "/readyz"])
def test_probes_answer(daemon: Daemon, path: str) -> None:
    assert read(daemon, path)[0] == 200


def test_an_unknown_path_is_404(daemon: Daemon) -> None:
    assert read(daemon, "/nothing")[0] == 404


def test_metrics_count_what_a_session_moved(daemon: Daemon) -> None:
    session = daemon.session(job="seen", host_bytes=4 * MIB, tile_bytes=256 * KIB)
    shard = session.register([ShardSpec("a", "float32", 8 * MIB, "param")])[0]
    for tile in range(len(shard.tiles)):
        session.fetch(shard, tile, Mode.OVERWRITE).wait().store()
    session.flush()
    session.fetch(shard, 0, Mode.READ).wait().release()

    def shown() -> bool:
        text = read(daemon, "/metrics")[1]
        lines = [line for line in text.splitlines() if line.startswith("offloadd_transfer_bytes_total")]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines) >= 8 * MIB

    assert until(shown)
    session.close()


def test_grpc_health_says_serving(daemon: Daemon) -> None:
    with grpc.insecure_channel(f"unix:{daemon.directory}/o.sock") as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service="offloadd.v1.ControlService"), timeout=10
        )
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_reflection_lists_the_control_service(daemon: Daemon) -> None:
    with grpc.insecure_channel(f"unix:{daemon.directory}/o.sock") as channel:
        services = ProtoReflectionDescriptorDatabase(channel).get_services()
    assert "offloadd.v1.ControlService" in services


def test_status_shows_a_table_and_json(daemon: Daemon) -> None:
    table = ctl("status", "--endpoint", daemon.endpoint)
    assert table.returncode == 0
    assert "swap paths" in table.stdout
    document = json.loads(ctl("status", "--endpoint", daemon.endpoint, "-o", "json").stdout)
    assert document["schema_version"] == 1
    assert document["paths"][0]["filesystem"]


def test_status_without_a_daemon_is_one_sentence_and_exit_code_4() -> None:
    done = ctl("status", "--endpoint", "unix:///nowhere/o.sock")
    assert done.returncode == 4
    assert "there is no socket /nowhere/o.sock" in done.stderr
    assert "Traceback" not in done.stderr


def test_doctor_works_without_a_daemon(daemon: Daemon) -> None:
    done = ctl("doctor", str(daemon.directory), "-o", "json")
    names = {finding["name"] for finding in json.loads(done.stdout)["findings"]}
    assert any("io_uring" in name for name in names)


def test_bench_measures_read_write_and_mixed(daemon: Daemon) -> None:
    arguments = ["--seconds", "0.1", "--runs", "1", "--size", "64MiB", "--memory", "32MiB", "-o", "json"]
    done = ctl("bench", str(daemon.directory), *arguments)
    assert done.returncode == 0, done.stderr
    modes = json.loads(done.stdout)["modes"]
    assert all(modes[mode]["rate"] > 0 for mode in ("read", "write", "mixed"))
