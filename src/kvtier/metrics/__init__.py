"""Metrics: counters, gauges and histograms, and the text that Prometheus reads.

The modules that count define the metrics: `connector/metrics.py`, `index/routes.py`, and for vLLM
`integrations/vllm/metrics.py`.
"""

from __future__ import annotations

from kvtier.metrics.registry import SECONDS, Histogram, Metric, MetricKind, Registry, Sample, format_family

__all__ = ["SECONDS", "Histogram", "Metric", "MetricKind", "Registry", "Sample", "format_family"]
