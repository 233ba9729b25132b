"""What ranks and tools import: connect, reserve, register, fetch, store.

Sees only `offloadd.core`, `offloadd.wire` and the native ring. Nothing here decides where bytes live.
"""

from offloadd.client.launcher import PrivateDaemon, start_private
from offloadd.client.session import ClientSession, Pending, RegisteredShard, Slot, connect
from offloadd.core.errors import Code, ConfigError, OffloadError
from offloadd.core.records import Mode, ShardSpec
from offloadd.wire.layout import PLAN_LENGTH_MAX

__all__ = [
    "PLAN_LENGTH_MAX",
    "ClientSession",
    "Code",
    "ConfigError",
    "Mode",
    "OffloadError",
    "Pending",
    "PrivateDaemon",
    "RegisteredShard",
    "ShardSpec",
    "Slot",
    "connect",
    "start_private",
]
