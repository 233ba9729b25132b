"""The store room: what is where, who holds it, and what has to move. It moves no bytes itself."""

from offloadd.store.catalog import Catalog
from offloadd.store.holdings import Registration, SessionTerms
from offloadd.store.placement import SwapTarget
from offloadd.store.store import Store, Verdict

__all__ = ["Catalog", "Registration", "SessionTerms", "Store", "SwapTarget", "Verdict"]
