"""Attention over paged KV caches: one interface, one plan of work, several backends.

Importing this package loads neither torch nor NumPy; a name is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tierkv_kernels.errors import BackendUnavailable, InvalidInput, KernelError

if TYPE_CHECKING:
    from tierkv_kernels.attention import paged_attention
    from tierkv_kernels.layout import block_view
    from tierkv_kernels.merge import merge_states
    from tierkv_kernels.planner import plan
    from tierkv_kernels.work import NO_MASK, Plan, Record
    from tierkv_kernels.writing import write_kv

__all__ = [
    "NO_MASK",
    "BackendUnavailable",
    "InvalidInput",
    "KernelError",
    "Plan",
    "Record",
    "block_view",
    "merge_states",
    "paged_attention",
    "plan",
    "write_kv",
]

_MODULE_OF = {
    "NO_MASK": "work",
    "Plan": "work",
    "Record": "work",
    "block_view": "layout",
    "merge_states": "merge",
    "paged_attention": "attention",
    "plan": "planner",
    "write_kv": "writing",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
