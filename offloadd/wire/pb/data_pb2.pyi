from offloadd.wire.pb import control_pb2 as _control_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ExchangeRequest(_message.Message):
    __slots__ = ("session", "entry", "lease", "offset", "data")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    session: _control_pb2.SessionRef
    entry: bytes
    lease: int
    offset: int
    data: bytes
    def __init__(self, session: _Optional[_Union[_control_pb2.SessionRef, _Mapping]] = ..., entry: _Optional[bytes] = ..., lease: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class ExchangeResponse(_message.Message):
    __slots__ = ("entries", "lease", "offset", "data")
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    entries: bytes
    lease: int
    offset: int
    data: bytes
    def __init__(self, entries: _Optional[bytes] = ..., lease: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...
