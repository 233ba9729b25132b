from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Code(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CODE_UNSPECIFIED: _ClassVar[Code]
    CODE_BAD_REQUEST: _ClassVar[Code]
    CODE_UNKNOWN_SHARD: _ClassVar[Code]
    CODE_BAD_RANGE: _ClassVar[Code]
    CODE_NOT_STORED: _ClassVar[Code]
    CODE_LEASE_CONFLICT: _ClassVar[Code]
    CODE_BAD_LEASE: _ClassVar[Code]
    CODE_STALE_SESSION: _ClassVar[Code]
    CODE_WRONG_USER: _ClassVar[Code]
    CODE_WRONG_WORLD: _ClassVar[Code]
    CODE_WRONG_VERSION: _ClassVar[Code]
    CODE_BAD_TOKEN: _ClassVar[Code]
    CODE_RANKS_DISAGREE: _ClassVar[Code]
    CODE_NO_SESSION: _ClassVar[Code]
    CODE_BAD_CONFIG: _ClassVar[Code]
    CODE_NO_HOST_BUDGET: _ClassVar[Code]
    CODE_NO_SWAP_BUDGET: _ClassVar[Code]
    CODE_SLOTS_EXHAUSTED: _ClassVar[Code]
    CODE_RING_FULL: _ClassVar[Code]
    CODE_DRAINING: _ClassVar[Code]
    CODE_CANCELLED: _ClassVar[Code]
    CODE_TIMED_OUT: _ClassVar[Code]
    CODE_RANK_LOST: _ClassVar[Code]
    CODE_UNAVAILABLE: _ClassVar[Code]
    CODE_IO_ERROR: _ClassVar[Code]
    CODE_NO_SPACE: _ClassVar[Code]
    CODE_SHORT_IO: _ClassVar[Code]
    CODE_CORRUPT: _ClassVar[Code]
    CODE_PATH_UNUSABLE: _ClassVar[Code]
    CODE_INTERNAL: _ClassVar[Code]
CODE_UNSPECIFIED: Code
CODE_BAD_REQUEST: Code
CODE_UNKNOWN_SHARD: Code
CODE_BAD_RANGE: Code
CODE_NOT_STORED: Code
CODE_LEASE_CONFLICT: Code
CODE_BAD_LEASE: Code
CODE_STALE_SESSION: Code
CODE_WRONG_USER: Code
CODE_WRONG_WORLD: Code
CODE_WRONG_VERSION: Code
CODE_BAD_TOKEN: Code
CODE_RANKS_DISAGREE: Code
CODE_NO_SESSION: Code
CODE_BAD_CONFIG: Code
CODE_NO_HOST_BUDGET: Code
CODE_NO_SWAP_BUDGET: Code
CODE_SLOTS_EXHAUSTED: Code
CODE_RING_FULL: Code
CODE_DRAINING: Code
CODE_CANCELLED: Code
CODE_TIMED_OUT: Code
CODE_RANK_LOST: Code
CODE_UNAVAILABLE: Code
CODE_IO_ERROR: Code
CODE_NO_SPACE: Code
CODE_SHORT_IO: Code
CODE_CORRUPT: Code
CODE_PATH_UNUSABLE: Code
CODE_INTERNAL: Code

class Failure(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: Code
    message: str
    def __init__(self, code: _Optional[_Union[Code, str]] = ..., message: _Optional[str] = ...) -> None: ...
