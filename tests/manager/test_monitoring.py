"""The page, dashboard and alerting rules about metrics: they name what `METRICS` has, and all of it."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dcp_remote.manager.telemetry import METRICS, Metric

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "monitoring.md").read_text()
DASHBOARD: dict[str, Any] = json.loads((ROOT / "examples" / "monitoring" / "dashboard.json").read_text())
RULES: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((ROOT / "examples" / "monitoring" / "alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
]
PANELS = [(panel["title"], target["expr"]) for panel in DASHBOARD["panels"] for target in panel["targets"]]
EXPRESSIONS = [*PANELS, *((rule["alert"], rule["expr"]) for rule in RULES)]

URL_LABEL = "dcp_remote_storage_url"


def series_of(metric: Metric) -> list[set[str]]:
    """Return the names of each series of a metric in Prometheus, which are two if exporters differ.

    Those of a histogram are three series. A unit that the name contains is written once by Prometheus and the collector
    (otlptranslator), twice by the Python exporter (seen with opentelemetry-exporter-prometheus 0.66b2).
    """
    name, unit = metric.name.replace(".", "_"), {"s": "seconds", "By": "bytes"}.get(metric.unit)
    names = {f"{name}_{unit}" if unit else name} | ({name} if unit and unit in name.split("_") else set())
    suffixes = {"histogram": ("_bucket", "_sum", "_count"), "observed gauge": ("",)}.get(metric.kind, ("_total",))
    return [{name + suffix for name in names} for suffix in suffixes]


def labels_of(metric: Metric) -> set[str]:
    """Return the labels of a metric in Prometheus."""
    return {URL_LABEL, *(attribute.replace(".", "_") for attribute in metric.attributes)}


ALL_LABELS = {label for metric in METRICS for label in labels_of(metric)}


def metrics_in(expression: str) -> Iterator[Metric]:
    """Yield the metrics whose series an expression selects, whichever exporter wrote them; raise for an unknown one."""
    code = re.sub(r'"[^"]*"', '""', expression)
    patterns = [re.escape(word) for word in re.findall(r"\bdcp_remote_\w+", code) if word not in ALL_LABELS]
    for pattern in [*patterns, *re.findall(r'__name__=~"([^"]*)"', expression)]:
        (found,) = (
            metric
            for metric in METRICS
            for series in series_of(metric)
            if all(re.fullmatch(pattern, name) for name in series)
        )
        yield found


def labels_in(expression: str) -> set[str]:
    """Return the labels by which an expression selects and groups."""
    grouped = [label for group in re.findall(r"\bby \(([^)]*)\)", expression) for label in group.split(", ")]
    return {*grouped, *re.findall(r"(\w+)(?:=~|!~|!=|=)\"", expression)} - {"le", "__name__"}


def test_expressions_select_what_is_there() -> None:
    """Each names metrics of the table, and labels that all of these have."""
    for title, expression in EXPRESSIONS:
        metrics = list(metrics_in(expression))
        assert metrics, title
        assert labels_in(expression) <= set.intersection(*(labels_of(metric) for metric in metrics)), title
        assert expression.count("(") == expression.count(")"), title


def test_wrong_expressions_are_found() -> None:
    """Try the checks themselves on misspelled names, and on a name that only one exporter writes."""
    for wrong in ("dcp_remote_failure_total", "dcp_remote_failures", "dcp_remote_bytes_read_total"):
        with pytest.raises(ValueError, match="unpack"):
            list(metrics_in(f'sum by ({URL_LABEL}) ({wrong}{{{URL_LABEL}="x"}})'))
    assert labels_in('sum by (a, le) (x{b=~"c", d!="e"})') == {"a", "b", "d"}


def test_the_dashboard_has_every_metric() -> None:
    """All metrics are shown, for the chosen runs, in panels that Grafana can place."""
    assert {metric for _, expression in PANELS for metric in metrics_in(expression)} == set(METRICS)
    assert all(f'{URL_LABEL}=~"$run"' in expression for _, expression in PANELS)
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert list(metrics_in(variables["run"]["definition"])) == [METRICS[0]]
    assert DASHBOARD["schemaVersion"] >= 36
    panels = DASHBOARD["panels"]
    assert "datasource" in variables
    assert {panel["datasource"]["uid"] for panel in panels} == {"${datasource}"}
    cells = Counter(
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    )
    assert set(cells.values()) == {1}
    assert max(x for x, _ in cells) < 24
    for key in ("id", "title"):
        assert len({panel[key] for panel in panels}) == len(panels)


def test_there_is_a_rule_for_each_trouble() -> None:
    """Old checkpoints, failing saves, repeated requests, orphans and failing retention have a rule, with a text."""
    watched = {metric.name for rule in RULES for metric in metrics_in(rule["expr"])}
    troubles = ("checkpoint.age", "failures", "retries", "orphans.left", "deletions.pending", "retention.failures")
    assert watched == {"dcp_remote.requests", *(f"dcp_remote.{trouble}" for trouble in troubles)}
    for rule in RULES:
        assert set(rule) - {"for"} == {"alert", "expr", "labels", "annotations"}
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "0s"))
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert URL_LABEL in rule["annotations"]["summary"]
        assert rule["annotations"]["description"]


def test_the_page_has_every_metric_and_rule() -> None:
    """The tables of the page have the names, labels and kinds of `METRICS`, and the rules, in their order."""
    rows = re.findall(r"^\| `(dcp_remote\.[\w.]+)` \| `(\w+)` \|([^|]*)\| ([^|]*) \|$", PAGE, re.MULTILINE)
    assert [name for name, *_ in rows] == [metric.name for metric in METRICS]
    for metric, (_, series, labels, text) in zip(METRICS, rows, strict=True):
        assert series in series_of(metric)[0] or f"{series}_bucket" in series_of(metric)[0]
        assert {URL_LABEL, *re.findall(r"`(\w+)`", labels)} == labels_of(metric)
        assert text.startswith(("gauge", "histogram")) == (metric.kind in ("observed gauge", "histogram"))
        assert ("rank 0" in text) == metric.kind.startswith("observed")
    assert re.findall(r"^\| `([A-Z]\w+)` \|", PAGE, re.MULTILINE) == [rule["alert"] for rule in RULES]
