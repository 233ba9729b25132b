"""Between asyncio and the pump: doorbells in, steps out, and sleep flags so that no wake-up is lost.

The pump is stepped until it has nothing more to do; then every ring is told that the daemon sleeps, and looked at once
more. A turn is bounded, so that control calls get their share of the loop. Owned by `offloadd.app`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from offloadd.core.clock import Clock
from offloadd.io.engine import Engine
from offloadd.pump import Pump
from offloadd.ring.shared import RingEndpoint
from offloadd.ring.stream import StreamEndpoint

STEPS_PER_TURN = 16
"""Steps in one callback of the loop before others get a turn."""
TICK_SECONDS = 0.25
"""How often the snapshot for telemetry is taken and deadlines are looked at."""


class PumpLoop:
    """Runs the pump on the event loop."""

    def __init__(
        self,
        pump: Pump,
        engine: Engine,
        clock: Clock,
        on_tick: Callable[[], None],
        on_failure: Callable[[Exception], None],
    ) -> None:
        """`on_failure`: told of a bug in the pump, which is not stepped any more: nothing is known of its state."""
        self._pump = pump
        self._engine = engine
        self._clock = clock
        self._on_tick = on_tick
        self._on_failure = on_failure
        self._loop = asyncio.get_running_loop()
        self._endpoints: dict[int, RingEndpoint | StreamEndpoint] = {}
        self._scheduled = False
        self._timer: asyncio.TimerHandle | None = None
        self._ticker: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._loop.add_reader(self._engine.fileno(), self._engine_rang)
        self._tick()

    def stop(self) -> None:
        self._loop.remove_reader(self._engine.fileno())
        for handle in (self._timer, self._ticker):
            if handle is not None:
                handle.cancel()

    def watch(self, endpoint: RingEndpoint | StreamEndpoint) -> None:
        self._endpoints[endpoint.session] = endpoint
        if isinstance(endpoint, RingEndpoint):
            self._loop.add_reader(endpoint.submission_doorbell, self._rung, endpoint)
        self.kick()

    def unwatch(self, session: int) -> None:
        endpoint = self._endpoints.pop(session, None)
        if isinstance(endpoint, RingEndpoint):
            self._loop.remove_reader(endpoint.submission_doorbell)

    def kick(self) -> None:
        """Step soon. Event loop only."""
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._scheduled_turn)

    def kick_threadsafe(self) -> None:
        """Step soon; for other threads. Harmless when the loop has ended."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.kick)

    def _scheduled_turn(self) -> None:
        self._scheduled = False
        self._turn()

    def _engine_rang(self) -> None:
        self._pump.engine_rang()
        self._turn()

    def _rung(self, endpoint: RingEndpoint) -> None:
        endpoint.wake()
        self._turn()

    def _turn(self) -> None:
        try:
            for _ in range(STEPS_PER_TURN):
                if not self._pump.step() and self._sleep():
                    self._arm_timer()
                    return
        except Exception as error:
            self.stop()
            for session in list(self._endpoints):
                self.unwatch(session)
            self._on_failure(error)
            return
        self.kick()

    def _sleep(self) -> bool:
        """Every ring knows that it must ring from now on; False if one has something already."""
        return all([endpoint.sleep() for endpoint in self._endpoints.values()])

    def _arm_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self._pump.next_deadline_ns()
        if deadline is not None:
            delay = max(0, deadline - self._clock.now_ns()) / 1e9
            self._timer = self._loop.call_later(delay, self._turn)

    def _tick(self) -> None:
        self._on_tick()
        self.kick()
        self._ticker = self._loop.call_later(TICK_SECONDS, self._tick)
