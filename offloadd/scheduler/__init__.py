"""The scheduler room: who is served next, with what. Pure."""

from offloadd.scheduler.scheduler import Pick, Scheduler

__all__ = ["Pick", "Scheduler"]
