"""How many bytes, when? Pure arithmetic over plan and layout: no torch in this room."""

from shardledger.ledger.categories import CATEGORIES, STATE_CATEGORIES
from shardledger.ledger.predict import OptimizerBytes, state_bytes

__all__ = ["CATEGORIES", "STATE_CATEGORIES", "OptimizerBytes", "state_bytes"]
