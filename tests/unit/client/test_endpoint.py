"""Which endpoints are understood."""

import pytest

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
