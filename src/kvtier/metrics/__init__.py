"""Metrics: counters, gauges and histograms, and the text that Prometheus reads.

Which there are stands with who counts: `connector/metrics.py`, `index/metrics.py`, and for vLLM
`integrations/vllm/metrics.py`.
"""

from __future__ import annotations

from kvtier.metrics.registry import SECONDS, Histogram, Metric, MetricKind, Registry, Sample, format_family

__all__ = ["SECONDS", "Histogram", "Metric", "MetricKind", "Registry", "Sample", "format_family"]
