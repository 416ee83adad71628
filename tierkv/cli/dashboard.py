"""``tierkv dashboard``: the files for Grafana and Prometheus that come with tierkv."""

from __future__ import annotations

from importlib.resources import files

import click


@click.group(no_args_is_help=False)
def dashboard() -> None:
    """Print the dashboard for Grafana and the alert rules for Prometheus.

    \b
    tierkv dashboard export > tierkv.json
    tierkv dashboard export --alerts > tierkv-alerts.yml
    """


@dashboard.command()
@click.option("--alerts", is_flag=True, help="Print the alert rules for Prometheus instead.")
def export(alerts: bool) -> None:
    """Print the dashboard for Grafana (JSON).

    Import it in Grafana; name the file of alert rules under rule_files in prometheus.yml. What to
    do about an alert is in docs/OPERATIONS.md.

    \b
    tierkv dashboard export > tierkv.json
    tierkv dashboard export --alerts > tierkv-alerts.yml
    """
    name = "alerts.yml" if alerts else "dashboard.json"
    click.echo((files("tierkv.obs") / "assets" / name).read_text(encoding="utf-8"), nl=False)
