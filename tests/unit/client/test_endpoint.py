"""Which endpoints are understood."""

import pytest

from offloadd.client import PrivateDaemon, connect, start_private
from offloadd.client.endpoint import parse
from offloadd.core.errors import ConfigError


@pytest.mark.parametrize("text", ["unix:///run/x.sock", "unix:/run/x.sock"])
def test_a_unix_endpoint_has_a_path_and_an_attach_path(text: str) -> None:
    endpoint = parse(text)
    assert (endpoint.path, endpoint.attach_path) == ("/run/x.sock", "/run/x.sock.attach")


def test_a_loopback_endpoint_has_an_address() -> None:
    assert parse("grpc://127.0.0.1:9000").target == "127.0.0.1:9000"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("/run/x.sock", "not understood"),
        ("unix:relative.sock", "absolute path"),
        ("unix:///" + "x" * 200, "at most 100 bytes"),
        ("grpc://10.0.0.1:9000", "not a loopback address"),
        ("grpc://example.org:9000", "not a loopback address"),
        ("grpc://127.0.0.1", "needs an address and a port"),
        ("grpc://127.0.0.1:99999", "needs an address and a port"),
    ],
)
def test_anything_else_is_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        parse(text)


@pytest.mark.parametrize("timeout_s", [float("nan"), float("inf"), -1.0, 0.0, 1e9])
def test_a_time_that_cannot_be_waited_for_is_one_sentence_before_anything_is_tried(timeout_s: float) -> None:
    calls = [
        lambda: connect("unix:///nowhere/o.sock", timeout_s=timeout_s),
        lambda: start_private(["/nowhere"], {}, timeout_s),
        lambda: PrivateDaemon("unix:///nowhere/o.sock", 1, "/nowhere").stop(timeout_s),
    ]
    for call in calls:
        with pytest.raises(
            ConfigError, match=r"timeout_s of .* is \S+ s, which cannot be waited for; give more than 0"
        ):
            call()
