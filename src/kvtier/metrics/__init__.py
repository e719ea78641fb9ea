"""Metrics: what each part of kvtier counts, described once, and the text that Prometheus reads."""

from __future__ import annotations

from kvtier.metrics.registry import SECONDS, Histogram, Metric, MetricKind, Registry, Sample, format_family

__all__ = ["SECONDS", "Histogram", "Metric", "MetricKind", "Registry", "Sample", "format_family"]
