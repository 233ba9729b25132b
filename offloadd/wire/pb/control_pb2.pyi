from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HelloRequest(_message.Message):
    __slots__ = ("api_version", "client_version")
    API_VERSION_FIELD_NUMBER: _ClassVar[int]
    CLIENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    api_version: int
    client_version: str
    def __init__(self, api_version: _Optional[int] = ..., client_version: _Optional[str] = ...) -> None: ...

class HelloResponse(_message.Message):
    __slots__ = ("api_version", "daemon_version", "pid", "engine", "driver", "paths", "private_daemon")
    API_VERSION_FIELD_NUMBER: _ClassVar[int]
    DAEMON_VERSION_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    DRIVER_FIELD_NUMBER: _ClassVar[int]
    PATHS_FIELD_NUMBER: _ClassVar[int]
    PRIVATE_DAEMON_FIELD_NUMBER: _ClassVar[int]
    api_version: int
    daemon_version: str
    pid: int
    engine: str
    driver: str
    paths: _containers.RepeatedScalarFieldContainer[str]
    private_daemon: bool
    def __init__(self, api_version: _Optional[int] = ..., daemon_version: _Optional[str] = ..., pid: _Optional[int] = ..., engine: _Optional[str] = ..., driver: _Optional[str] = ..., paths: _Optional[_Iterable[str]] = ..., private_daemon: _Optional[bool] = ...) -> None: ...

class OpenSessionRequest(_message.Message):
    __slots__ = ("ticket", "job", "launch_id", "rank", "world_size", "local_world_size", "host_bytes_min", "swap_bytes_min", "weight")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    LAUNCH_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    LOCAL_WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    HOST_BYTES_MIN_FIELD_NUMBER: _ClassVar[int]
    SWAP_BYTES_MIN_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    ticket: str
    job: str
    launch_id: str
    rank: int
    world_size: int
    local_world_size: int
    host_bytes_min: int
    swap_bytes_min: int
    weight: float
    def __init__(self, ticket: _Optional[str] = ..., job: _Optional[str] = ..., launch_id: _Optional[str] = ..., rank: _Optional[int] = ..., world_size: _Optional[int] = ..., local_world_size: _Optional[int] = ..., host_bytes_min: _Optional[int] = ..., swap_bytes_min: _Optional[int] = ..., weight: _Optional[float] = ...) -> None: ...

class OpenSessionResponse(_message.Message):
    __slots__ = ("session", "secret", "job", "incarnation")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    session: int
    secret: str
    job: str
    incarnation: int
    def __init__(self, session: _Optional[int] = ..., secret: _Optional[str] = ..., job: _Optional[str] = ..., incarnation: _Optional[int] = ...) -> None: ...

class SessionRef(_message.Message):
    __slots__ = ("session", "secret")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    session: int
    secret: str
    def __init__(self, session: _Optional[int] = ..., secret: _Optional[str] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("session", "host_bytes", "swap_bytes", "timeout_s", "tile_bytes", "pinned_tiles", "fingerprint")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    HOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    SWAP_BYTES_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    TILE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PINNED_TILES_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    session: SessionRef
    host_bytes: int
    swap_bytes: int
    timeout_s: float
    tile_bytes: int
    pinned_tiles: int
    fingerprint: str
    def __init__(self, session: _Optional[_Union[SessionRef, _Mapping]] = ..., host_bytes: _Optional[int] = ..., swap_bytes: _Optional[int] = ..., timeout_s: _Optional[float] = ..., tile_bytes: _Optional[int] = ..., pinned_tiles: _Optional[int] = ..., fingerprint: _Optional[str] = ...) -> None: ...

class ReserveResponse(_message.Message):
    __slots__ = ("host_bytes", "swap_bytes", "tile_bytes", "arena_offset", "ring_entries", "generation")
    HOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    SWAP_BYTES_FIELD_NUMBER: _ClassVar[int]
    TILE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ARENA_OFFSET_FIELD_NUMBER: _ClassVar[int]
    RING_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    host_bytes: int
    swap_bytes: int
    tile_bytes: int
    arena_offset: int
    ring_entries: int
    generation: int
    def __init__(self, host_bytes: _Optional[int] = ..., swap_bytes: _Optional[int] = ..., tile_bytes: _Optional[int] = ..., arena_offset: _Optional[int] = ..., ring_entries: _Optional[int] = ..., generation: _Optional[int] = ...) -> None: ...

class Shard(_message.Message):
    __slots__ = ("name", "dtype", "length", "kind", "in_memory_only", "tile_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    IN_MEMORY_ONLY_FIELD_NUMBER: _ClassVar[int]
    TILE_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    length: int
    kind: str
    in_memory_only: bool
    tile_bytes: int
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., length: _Optional[int] = ..., kind: _Optional[str] = ..., in_memory_only: _Optional[bool] = ..., tile_bytes: _Optional[int] = ...) -> None: ...

class RegisterShardsRequest(_message.Message):
    __slots__ = ("session", "shards")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    session: SessionRef
    shards: _containers.RepeatedCompositeFieldContainer[Shard]
    def __init__(self, session: _Optional[_Union[SessionRef, _Mapping]] = ..., shards: _Optional[_Iterable[_Union[Shard, _Mapping]]] = ...) -> None: ...

class RegisterShardsResponse(_message.Message):
    __slots__ = ("first_shard", "swap_bytes_used")
    FIRST_SHARD_FIELD_NUMBER: _ClassVar[int]
    SWAP_BYTES_USED_FIELD_NUMBER: _ClassVar[int]
    first_shard: int
    swap_bytes_used: int
    def __init__(self, first_shard: _Optional[int] = ..., swap_bytes_used: _Optional[int] = ...) -> None: ...

class SubmitPlanRequest(_message.Message):
    __slots__ = ("session", "shards", "tiles", "modes", "steps")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    TILES_FIELD_NUMBER: _ClassVar[int]
    MODES_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    session: SessionRef
    shards: _containers.RepeatedScalarFieldContainer[int]
    tiles: _containers.RepeatedScalarFieldContainer[int]
    modes: _containers.RepeatedScalarFieldContainer[int]
    steps: int
    def __init__(self, session: _Optional[_Union[SessionRef, _Mapping]] = ..., shards: _Optional[_Iterable[int]] = ..., tiles: _Optional[_Iterable[int]] = ..., modes: _Optional[_Iterable[int]] = ..., steps: _Optional[int] = ...) -> None: ...

class SubmitPlanResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SessionStatisticsRequest(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: SessionRef
    def __init__(self, session: _Optional[_Union[SessionRef, _Mapping]] = ...) -> None: ...

class SessionStatisticsResponse(_message.Message):
    __slots__ = ("counters",)
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    counters: _containers.ScalarMap[str, float]
    def __init__(self, counters: _Optional[_Mapping[str, float]] = ...) -> None: ...

class CloseSessionRequest(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: SessionRef
    def __init__(self, session: _Optional[_Union[SessionRef, _Mapping]] = ...) -> None: ...

class CloseSessionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: str
    def __init__(self, json: _Optional[str] = ...) -> None: ...
