"""Does the installed vLLM have the interface that the connector was written for?

vLLM calls its connector interface experimental: it changes. A method that it calls otherwise than
the connector expects must be an error at start that names it, not a wrong result later.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tierkv.errors import VersionMismatch

KNOWN_VERSIONS = "0.32 and 0.33"


def require_fit(connector: type, bases: Sequence[type], version: str) -> None:
    """Raise VersionMismatch, naming all that does not fit, unless ``connector`` fits ``bases``.

    Every method of it that a base has, too, must take what the base's takes; every abstract method
    of a base must be there; and every public method must be one that a base has, or one of the
    connector's ``OPTIONAL`` ones. ``version``: of the vLLM that ``bases`` are from.
    """
    faults = [fault for base in bases for fault in _missing(connector, base)]
    for name, own in sorted(_public_methods(connector).items()):
        theirs = [_public_methods(base)[name] for base in bases if name in _public_methods(base)]
        if theirs:
            faults += [fault for other in theirs for fault in _differences(name, own, other)]
        elif name not in connector.OPTIONAL:  # type: ignore[attr-defined]  # ours has it
            faults.append(f"{name}() is not called by this vLLM")
    if faults:
        raise VersionMismatch(
            f"tierkv's connector knows vLLM {KNOWN_VERSIONS}, and vLLM {version} differs: "
            f"{'; '.join(faults)}. Install a version of vLLM or of tierkv that fits",
            theirs=version,
        )


def _missing(connector: type, base: type) -> list[str]:
    wanted: frozenset[str] = getattr(base, "__abstractmethods__", frozenset())
    open_ones: frozenset[str] = getattr(connector, "__abstractmethods__", frozenset())
    return [f"{name}() is required" for name in sorted(wanted & open_ones)]


def _public_methods(cls: type) -> Mapping[str, Callable[..., Any]]:
    found = {}
    for name, member in vars(cls).items():
        function = getattr(member, "__func__", member)
        if not name.startswith("_") and inspect.isfunction(function):
            found[name] = function
    return found


def _differences(name: str, own: Callable[..., Any], theirs: Callable[..., Any]) -> list[str]:
    """Whether ``own`` may be called in every way that ``theirs`` may be."""
    ours = inspect.signature(own).parameters
    takes_any = {parameter.kind for parameter in ours.values()}
    keywords = inspect.Parameter.VAR_KEYWORD in takes_any
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    expected = inspect.signature(theirs).parameters
    named = [key for key, value in expected.items() if value.kind not in variadic]
    own_named = [key for key, value in ours.items() if value.kind not in variadic]
    faults = []
    if named != own_named[: len(named)]:
        faults.append(f"{name}({', '.join(named)}) is called, not ({', '.join(own_named)})")
    elif any(ours[key].default is inspect.Parameter.empty for key in own_named[len(named) :]):
        faults.append(f"{name}() is called without {', '.join(own_named[len(named) :])}")
    wants_keywords = any(value.kind is inspect.Parameter.VAR_KEYWORD for value in expected.values())
    if wants_keywords and not keywords:
        faults.append(f"{name}() is called with more keywords")
    return faults
