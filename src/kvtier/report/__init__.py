"""The demo's report: one self-contained HTML file.

`page` composes it, `figures` and `plots` draw, `style` is its CSS.
"""

from __future__ import annotations

from kvtier.report.page import render_report

__all__ = ["render_report"]
