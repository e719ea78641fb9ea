"""The demo's report: one self-contained HTML file.

`page` composes it and has its CSS; `figures` and `plots` draw.
"""

from __future__ import annotations

from kvtier.report.page import render_report

__all__ = ["render_report"]
