"""The look of the report: two palettes, one layout. Plots take their colours from here by class name."""

from __future__ import annotations

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --ink: #16202c; --soft: #5b6876; --line: #dfe4ea; --band: #f1f4f7;
  --off: #8a94a0; --on: #1c6dd0; --gpu: #2a9d7c; --cpu: #1c6dd0; --disk: #7a4fc4; --recomputed: #e59a3c;
  --good: #12724e; --good-back: #dcf3e8; --bad: #a3201d; --bad-back: #fbe3e1;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #10151c; --card: #19202a; --ink: #e8edf3; --soft: #9aa7b5; --line: #2c3643; --band: #1f2733;
    --off: #8793a1; --on: #5aa5f8; --gpu: #3fbf98; --cpu: #5aa5f8; --disk: #b08df0; --recomputed: #e3a24f;
    --good: #7fe0b5; --good-back: #14382b; --bad: #ffaaa4; --bad-back: #46201f;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink); line-height: 1.5;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
}
main { max-width: 1120px; margin: 0 auto; padding: 40px 20px 8px; }
h1 { font-size: clamp(30px, 6.2vw, 56px); line-height: 1.08; margin: 4px 0 18px; letter-spacing: -0.025em; }
h2 { font-size: 18px; line-height: 1.3; margin: 0 0 4px; }
p { margin: 0 0 10px; }
.brand { color: var(--on); font-weight: 650; margin: 0; }
.model {
  display: block; font-size: 18px; line-height: 1.35; letter-spacing: 0; font-weight: 500; margin-top: 8px;
  overflow-wrap: anywhere;
}
.lead { color: var(--soft); font-size: 18px; max-width: 46em; margin: 0 0 22px; }
.badge {
  display: inline-block; padding: 5px 14px; border-radius: 16px; font-weight: 600; font-size: 15px;
  margin: 0 0 16px;
}
.good { color: var(--good); background: var(--good-back); }
.bad { color: var(--bad); background: var(--bad-back); }
.tiles { display: grid; grid-template-columns: repeat(4, 1fr); gap: 14px; }
.tile, section:not(.plots), figure, details {
  background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 16px 18px;
}
.tile p { margin: 0; color: var(--soft); font-size: 14px; }
.tile p.value {
  color: var(--ink); font-size: 20px; margin-top: 2px; font-variant-numeric: tabular-nums;
  white-space: nowrap;
}
.tile strong { color: var(--on); }
.was { color: var(--soft); }
section, details { margin-top: 18px; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(400px, 100%), 1fr)); gap: 18px; }
figure { margin: 0; }
figcaption p { color: var(--soft); font-size: 14px; margin: 0 0 8px; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 18px; font-size: 14px; margin: 0 0 6px; }
.swatch { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 7px; }
.swatch.off { background: var(--off); } .swatch.on { background: var(--on); }
.swatch.gpu { background: var(--gpu); } .swatch.cpu { background: var(--cpu); }
.swatch.recomputed { background: var(--recomputed); } .swatch.disk { background: var(--disk); }
svg { display: block; width: 100%; max-width: 640px; height: auto; margin: 0 auto; overflow: visible; }
svg text { fill: var(--soft); font-size: 13px; text-anchor: middle; font-variant-numeric: tabular-nums; }
svg text.end, svg text.value { text-anchor: end; }
svg text.start { text-anchor: start; }
svg text.value { font-size: 15px; font-weight: 650; }
svg text.median { font-size: 15px; font-weight: 650; fill: var(--ink); }
svg text.value.off { fill: var(--soft); } svg text.value.on { fill: var(--on); }
.grid { stroke: var(--line); stroke-width: 1; }
.axis { stroke: var(--soft); stroke-width: 1.2; }
.band { fill: var(--band); }
.line { fill: none; stroke-width: 2.4; stroke-linejoin: round; stroke-linecap: round; }
.line.off { stroke: var(--off); } .line.on { stroke: var(--on); }
.line.link { stroke: var(--line); stroke-width: 1.4; }
.dot.off { fill: var(--card); stroke: var(--off); stroke-width: 1.8; } .dot.on { fill: var(--on); }
.dot.single { fill: var(--ink); fill-opacity: 0.45; }
.fill.gpu { fill: var(--gpu); } .fill.cpu { fill: var(--cpu); } .fill.recomputed { fill: var(--recomputed); }
.fill.disk { fill: var(--disk); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 15px; font-variant-numeric: tabular-nums; }
th { text-align: left; color: var(--soft); font-weight: 500; font-size: 14px; }
th, td { padding: 6px 14px 6px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
tbody tr:last-child td { border-bottom: 0; }
th + th, td + td { text-align: right; padding: 6px 0 6px 18px; }
.words th, .words td { text-align: left; }
.wide td { white-space: nowrap; }
.sub { display: block; padding-left: 18px; }
.soft { color: var(--soft); font-size: 14px; }
pre {
  background: var(--page); border-radius: 8px; padding: 10px 14px; overflow-x: auto; font-size: 14px;
  margin: 0 0 14px;
}
summary { cursor: pointer; font-weight: 650; }
footer { max-width: 1120px; margin: 0 auto; padding: 16px 20px 40px; color: var(--soft); font-size: 14px; }
@media (max-width: 1000px) {
  .tiles { grid-template-columns: 1fr 1fr; }
  svg text { font-size: 15px; }
}
@media (max-width: 560px) {
  main { padding: 24px 14px 8px; }
  .tile, section:not(.plots), figure, details { padding: 14px; }
  .tiles { gap: 10px; }
  .tile p.value { font-size: 17px; white-space: normal; }
  .lead { font-size: 16px; }
  svg text { font-size: 16px; }
  thead { display: none; }
  table, tbody, tr, td { display: block; }
  tr { padding: 8px 0; border-bottom: 1px solid var(--line); }
  tbody tr:last-child { border-bottom: 0; }
  td, td + td, .words td {
    display: flex; flex-wrap: wrap; justify-content: space-between; gap: 0 12px; padding: 1px 0; border: 0;
  }
  td, .words td { text-align: left; overflow-wrap: anywhere; white-space: normal; }
  td:first-child { font-weight: 600; }
  td[data-column]::before { content: attr(data-column); color: var(--soft); font-weight: 400; }
  td:first-child::before { content: none; }
  td.empty { display: none; }
  td + td:not([data-column]) { justify-content: flex-end; color: var(--on); }
  .words td::before { content: none; }
  .soft { font-weight: 400; }
  .was, .tile strong { white-space: nowrap; }
  pre { white-space: pre-wrap; overflow-wrap: anywhere; }
  .sub { padding-left: 0; }
}
@media print { body { background: #fff; } figure, section { break-inside: avoid; } }
"""
