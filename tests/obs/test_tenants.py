"""Namespaces added up by tenant, under a bounded set of labels that keep their meaning."""

from __future__ import annotations

from tierkv.obs.status import HeldStatus, NamespaceStatus
from tierkv.obs.tenants import NOBODY, OTHERS, TENANTS_MAX, Tenant, by_tenant


def namespace(number: int, tenant: str, **numbers: int) -> NamespaceStatus:
    """A namespace with some blocks in the disk tier."""
    return NamespaceStatus(
        id=number,
        model="m",
        dtype="float32",
        block_tokens=16,
        block_bytes=4096,
        tenant=tenant,
        tiers={"disk": HeldStatus(blocks=1, bytes=4096)},
        **numbers,
    )


def test_namespaces_of_one_tenant_are_added_up() -> None:
    found = by_tenant(
        [
            namespace(0, "a", blocks=1, lookup_tokens=10, hit_tokens=5),
            namespace(1, "b", blocks=2),
            namespace(2, "a", blocks=4, lookup_tokens=100, hit_tokens=50),
        ]
    )
    assert found == {
        "a": Tenant(5, 110, 55, {"disk": 8192}),
        "b": Tenant(2, 0, 0, {"disk": 4096}),
    }


def test_who_says_nothing_is_nobody() -> None:
    assert list(by_tenant([namespace(0, "")])) == [NOBODY]


def test_labels_are_bounded_and_who_came_first_keeps_its_own() -> None:
    many = [namespace(number, f"t{number}", blocks=number) for number in range(TENANTS_MAX + 50)]
    found = by_tenant(reversed(many))
    assert len(found) == TENANTS_MAX + 1
    assert list(found)[:2] == ["t0", "t1"]
    assert found[OTHERS].blocks == sum(range(TENANTS_MAX, TENANTS_MAX + 50))
