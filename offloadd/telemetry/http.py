"""/metrics, /livez and /readyz on a loopback port, served by threads of their own.

The event loop publishes a snapshot now and then; a scrape renders the latest one and never touches the loop.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

LOOP_STALL_SECONDS = 30.0
"""/livez fails when the event loop has not beaten for this long."""


class Heartbeat:
    """The loop's sign of life and readiness; written by the loop, read by the server's threads."""

    def __init__(self) -> None:
        self.ready = False
        self._beat = time.monotonic()

    def beat(self) -> None:
        self._beat = time.monotonic()

    def alive(self) -> bool:
        return time.monotonic() - self._beat < LOOP_STALL_SECONDS


class TelemetryServer:
    """Serves `render()` and the heartbeat."""

    def __init__(self, host: str, port: int, render: Callable[[], bytes], heartbeat: Heartbeat) -> None:
        handler = _handler(render, heartbeat)
        self._server = ThreadingHTTPServer((host, port), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="telemetry", daemon=True)

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)


def _handler(render: Callable[[], bytes], heartbeat: Heartbeat) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 5  # a client that sends nothing does not keep a thread

        def do_GET(self) -> None:
            path = self.path.split("?", 1)[0]
            if path == "/metrics":
                self._answer(HTTPStatus.OK, render(), "text/plain; version=0.0.4; charset=utf-8")
            elif path == "/livez":
                self._state(heartbeat.alive(), b"alive\n", b"the event loop does not turn\n")
            elif path == "/readyz":
                self._state(heartbeat.ready and heartbeat.alive(), b"ready\n", b"starting or draining\n")
            else:
                self._answer(HTTPStatus.NOT_FOUND, b"try /metrics, /livez or /readyz\n", "text/plain")

        def _state(self, good: bool, yes: bytes, no: bytes) -> None:
            self._answer(HTTPStatus.OK if good else HTTPStatus.SERVICE_UNAVAILABLE, yes if good else no, "text/plain")

        def _answer(self, status: HTTPStatus, body: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Scrapes are not worth a log line."""

    return Handler
