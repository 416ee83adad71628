"""What each tenant has and finds: namespaces added up, under a bounded set of names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tierkv.obs.status import NamespaceStatus

TENANTS_MAX = 100
"""Tenants with labels of their own."""

OTHERS = "other"
"""All the rest. Who came first keeps its label, so that no counter ever goes back."""

NOBODY = "none"
"""Namespaces that do not say whose they are."""


@dataclass(slots=True)
class Tenant:
    """Sums over the namespaces of one tenant."""

    blocks: int = 0
    lookup_tokens: int = 0
    hit_tokens: int = 0
    tier_bytes: dict[str, int] = field(default_factory=dict)


def by_tenant(namespaces: Iterable[NamespaceStatus]) -> dict[str, Tenant]:
    """Tenants by label, in the order in which their first namespace was opened."""
    found: dict[str, Tenant] = {}
    for namespace in sorted(namespaces, key=lambda one: one.id):
        label = namespace.tenant or NOBODY
        if label not in found and len(found) >= TENANTS_MAX:
            label = OTHERS
        tenant = found.setdefault(label, Tenant())
        tenant.blocks += namespace.blocks
        tenant.lookup_tokens += namespace.lookup_tokens
        tenant.hit_tokens += namespace.hit_tokens
        for tier, held in namespace.tiers.items():
            tenant.tier_bytes[tier] = tenant.tier_bytes.get(tier, 0) + held.bytes
    return found
