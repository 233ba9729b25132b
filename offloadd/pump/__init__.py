"""The conductor: the only caller of the rooms, carrying the records between them.

    drain -> admit -> reap -> settle -> pick -> prepare -> submit -> post

`conductor` has the step; `desk` answers requests; `serving` starts transfers; `flights` knows what is in the engine;
`replies` what goes back.
"""

from offloadd.pump.conductor import Endpoint, Pump

__all__ = ["Endpoint", "Pump"]
