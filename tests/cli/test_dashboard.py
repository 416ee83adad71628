"""``tierkv dashboard`` prints the files that are shipped."""

from __future__ import annotations

from collections.abc import Callable

from tierkv.obs import alerts, dashboard


def test_export_prints_the_dashboard_or_the_alerts(
    tierkv: Callable[..., tuple[int, str, str]],
) -> None:
    assert tierkv("dashboard", "export") == (0, dashboard.text(), "")
    assert tierkv("dashboard", "export", "--alerts") == (0, alerts.rules(), "")
