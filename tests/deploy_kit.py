"""The queries in `deploy/`: those of the dashboard's panels, and those of the alerts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

DEPLOY = Path(__file__).parents[1] / "deploy"
_VARIABLES = {"$__rate_interval": "30s", "$__range": "1m", "$job": ".*", "$instance": ".*", "$model": ".*"}


def load_dashboard() -> Any:
    """Return the dashboard that is committed."""
    return json.loads((DEPLOY / "grafana" / "kvtier.json").read_text())


def load_alerts() -> list[dict[str, Any]]:
    """Return all alerts."""
    import yaml

    groups = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panel_queries() -> dict[str, str]:
    """Return the queries of panels by panel and legend, with values in the place of Grafana's variables."""
    found = {}
    for panel in load_dashboard()["panels"]:
        for target in panel.get("targets", ()):
            query = target["expr"]
            for name, value in _VARIABLES.items():
                query = query.replace(name, value)
            found[f"{panel['id']} {panel['title']}: {target['legendFormat']}"] = query
    return found


def metrics_in(*queries: str) -> set[str]:
    """Return the names of the metrics in queries; all that are asked for have one of two prefixes."""
    return {name for query in queries for name in re.findall(r"\b(?:vllm:|kvtier_index_)[a-z_]+", query)}


def all_metrics() -> set[str]:
    """Return the names of the metrics in all panels and alerts."""
    return metrics_in(*panel_queries().values(), *(rule["expr"] for rule in load_alerts()))
