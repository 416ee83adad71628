"""The core's counters, as the metrics read them."""

from tierkv.core.counters import WINDOW_TOKENS, Counters, HitWindow

__all__ = ["WINDOW_TOKENS", "Counters", "HitWindow"]
