"""ControlService: protobuf in, protobuf out. Authenticates, checks shapes, and leaves the rest to Lifecycle."""

from __future__ import annotations

import asyncio
import json
import math
import os
import secrets
from collections.abc import Callable
from importlib import metadata
from typing import Any

import grpc

from offloadd.control.guard import guarded
from offloadd.control.lifecycle import Lifecycle
from offloadd.core.errors import Code, OffloadError
from offloadd.core.records import ShardSpec
from offloadd.session.attach import AttachServer
from offloadd.session.peer import Peer
from offloadd.session.registry import OpenRequest, Session
from offloadd.session.reservation import Need
from offloadd.wire.layout import API_VERSION, PLAN_LENGTH_MAX, RING_ENTRIES
from offloadd.wire.pb import control_pb2, control_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]

SHARDS_PER_CALL_MAX = 100_000
TIMEOUT_SECONDS_MAX = 3600.0


class Authenticator:
    """Who may call. Over the Unix socket a ticket from the attach socket stands for peer credentials; over TCP the
    token stands for the daemon's own user."""

    def __init__(self, attach: AttachServer, token: str) -> None:
        self._attach = attach
        self._token = token

    def over_tcp(self, context: Context) -> bool:
        return not str(context.peer()).startswith("unix:")

    def check_token(self, context: Context) -> None:
        """BAD_TOKEN unless the call came over the Unix socket or carries the token."""
        if not self.over_tcp(context):
            return
        given = dict(context.invocation_metadata() or ()).get("authorization", "")
        if not self._token or not secrets.compare_digest(str(given), self._token):
            raise OffloadError(Code.BAD_TOKEN, "this call needs the token in the daemon's control.token_file")

    def identify(self, context: Context, ticket: str) -> tuple[int, Peer | None]:
        """(uid, peer) of a caller that opens a session."""
        self.check_token(context)
        if self.over_tcp(context):
            return os.getuid(), None
        peer = self._attach.peer(ticket)
        return peer.uid, peer


class ControlService(control_pb2_grpc.ControlServiceServicer):
    """The gRPC face of Lifecycle."""

    def __init__(
        self,
        lifecycle: Lifecycle,
        authenticator: Authenticator,
        describe: Callable[[], dict[str, Any]],
        hello: control_pb2.HelloResponse,
    ) -> None:
        self._lifecycle = lifecycle
        self._authenticator = authenticator
        self._describe = describe
        self._hello = hello

    @guarded
    async def Hello(self, request: control_pb2.HelloRequest, context: Context) -> control_pb2.HelloResponse:
        self._authenticator.check_token(context)
        return self._hello

    @guarded
    async def OpenSession(
        self, request: control_pb2.OpenSessionRequest, context: Context
    ) -> control_pb2.OpenSessionResponse:
        uid, peer = self._authenticator.identify(context, request.ticket)
        opening = OpenRequest(
            job=request.job,
            launch_id=request.launch_id,
            rank=request.rank,
            world_size=request.world_size,
            local_world_size=request.local_world_size,
            host_bytes_min=request.host_bytes_min,
            swap_bytes_min=request.swap_bytes_min,
            weight=_number(request.weight, "weight"),
        )
        session = await self._lifecycle.open(opening, uid, peer, request.ticket)
        return control_pb2.OpenSessionResponse(
            session=session.id, secret=session.secret, job=session.job.name, incarnation=session.incarnation
        )

    @guarded
    async def Reserve(self, request: control_pb2.ReserveRequest, context: Context) -> control_pb2.ReserveResponse:
        session = self._session(request.session, context)
        need = Need(
            request.host_bytes, request.swap_bytes, request.tile_bytes, request.pinned_tiles, request.fingerprint
        )
        timeout_s = min(max(_number(request.timeout_s, "timeout_s"), 0.1), TIMEOUT_SECONDS_MAX)
        region = await self._lifecycle.reserve(session, need, timeout_s, self._authenticator.over_tcp(context))
        return control_pb2.ReserveResponse(
            host_bytes=region.length,
            swap_bytes=session.swap_bytes,
            tile_bytes=session.tile_bytes,
            arena_offset=region.offset,
            ring_entries=RING_ENTRIES,
            generation=session.incarnation,
        )

    @guarded
    async def RegisterShards(
        self, request: control_pb2.RegisterShardsRequest, context: Context
    ) -> control_pb2.RegisterShardsResponse:
        session = self._session(request.session, context)
        if len(request.shards) > SHARDS_PER_CALL_MAX:
            raise OffloadError(
                Code.BAD_REQUEST, f"{len(request.shards)} shards in one call; send at most {SHARDS_PER_CALL_MAX}"
            )
        specs = await asyncio.to_thread(_specs, request)
        first, used = await self._lifecycle.register(session, specs)
        return control_pb2.RegisterShardsResponse(first_shard=first, swap_bytes_used=used)

    @guarded
    async def SubmitPlan(
        self, request: control_pb2.SubmitPlanRequest, context: Context
    ) -> control_pb2.SubmitPlanResponse:
        session = self._session(request.session, context)
        lengths = {len(request.shards), len(request.tiles), len(request.modes)}
        if len(lengths) != 1 or max(lengths) > PLAN_LENGTH_MAX:
            raise OffloadError(
                Code.BAD_REQUEST,
                f"a plan of {len(request.shards)} shards, {len(request.tiles)} tiles and {len(request.modes)} modes; "
                f"all must be as long, {PLAN_LENGTH_MAX} at most",
            )
        await self._lifecycle.plan(session, request.shards, request.tiles, request.modes, request.steps)
        return control_pb2.SubmitPlanResponse()

    @guarded
    async def SessionStatistics(
        self, request: control_pb2.SessionStatisticsRequest, context: Context
    ) -> control_pb2.SessionStatisticsResponse:
        session = self._session(request.session, context)
        return control_pb2.SessionStatisticsResponse(counters=self._lifecycle.statistics(session))

    @guarded
    async def CloseSession(
        self, request: control_pb2.CloseSessionRequest, context: Context
    ) -> control_pb2.CloseSessionResponse:
        session = self._session(request.session, context)
        if not await self._lifecycle.close(session, "closed by the client", clean=True):
            raise OffloadError(
                Code.TIMED_OUT,
                f"{session.title} has ended, but its memory is still held by a transfer; look at the daemon's log",
            )
        return control_pb2.CloseSessionResponse()

    @guarded
    async def Status(self, request: control_pb2.StatusRequest, context: Context) -> control_pb2.StatusResponse:
        self._authenticator.check_token(context)
        return control_pb2.StatusResponse(json=json.dumps(self._describe()))

    def _session(self, reference: control_pb2.SessionRef, context: Context) -> Session:
        self._authenticator.check_token(context)
        return self._lifecycle.authenticate(reference.session, reference.secret)


def _specs(request: control_pb2.RegisterShardsRequest) -> list[ShardSpec]:
    return [
        ShardSpec(s.name, s.dtype, s.length, s.kind, on_disk=not s.in_memory_only, tile_bytes=s.tile_bytes)
        for s in request.shards
    ]


def _number(value: float, what: str) -> float:
    """BAD_REQUEST for what is no number at all, or has no end."""
    if not math.isfinite(value):
        raise OffloadError(Code.BAD_REQUEST, f"{what} is {value}; give a finite number")
    return value


def hello(engine: str, driver: str, paths: list[str], private: bool) -> control_pb2.HelloResponse:
    """What this daemon says of itself."""
    return control_pb2.HelloResponse(
        api_version=API_VERSION,
        daemon_version=metadata.version("offloadd"),
        pid=os.getpid(),
        engine=engine,
        driver=driver,
        paths=paths,
        private_daemon=private,
    )
