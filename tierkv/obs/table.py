"""The table of metrics."""

from __future__ import annotations

from tierkv.obs.table_cache import CACHE
from tierkv.obs.table_service import SERVICE

METRICS = (*CACHE, *SERVICE)
"""All metrics, in the order of the documentation."""
