"""The Grafana dashboard of kvtier, as code: `make deploy` writes it to `grafana/kvtier.json`.

    python deploy/dashboard.py [--check]     # --check: change nothing, and fail if the file is out of date

Needs the extra `dashboard`. `tests/vllm/test_dashboard.py` runs every query over a real vLLM. Panels of rare
failures show totals since the engine's start instead of rates: a counter with a label first appears with its
first count, which no rate sees.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, statetimeline, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as looks
from grafana_foundation_sdk.models import dashboard as model

FILE = Path(__file__).parent / "grafana" / "kvtier.json"
SOURCE = model.DataSourceRef(type_val="prometheus", uid="${datasource}")
ENGINE = '{job=~"$job",instance=~"$instance",model_name=~"$model"}'
INDEX = '{model=~"$model"}'
"""Of an index, which is a job of its own. Prometheus renames its label `instance` to `exported_instance`."""
RATE = "[$__rate_interval]"
TIER, WHERE = "instance, tier", "{{instance}} {{tier}}"

Queries = dict[str, str]
"""The queries of a panel by their legends."""
Panels = list[timeseries.Panel | stat.Panel | statetimeline.Panel]


def rate(name: str, by: str = "", of: str = ENGINE) -> str:
    """Return the query for how much a counter grows in a second, summed over all but some labels."""
    return f"sum by ({by}) (rate({name}_total{of}{RATE}))"


def ours(name: str, by: str = "") -> str:
    """Return the same for a counter of kvtier."""
    return rate(f"vllm:kvtier_{name}", by)


def shown(name: str, by: str = "instance", of: str = ENGINE) -> str:
    """Return the query for a gauge, or for a counter since the start, summed over all but some labels."""
    return f"sum by ({by}) ({name}{of})"


def totals(listed: Queries, by: str = "instance", where: str = "{{instance}}") -> Queries:
    """Return the queries for metrics of kvtier, given by the words for their legends."""
    return {f"{where} {text}": shown(f"vllm:kvtier_{name}", by) for text, name in listed.items()}


def quantiles(name: str, label: str = "", of: str = ENGINE) -> Queries:
    """Return the queries for the median and the 99th percentile of a histogram."""
    by, legend = (f"le, {label}", f" {{{{{label}}}}}") if label else ("le", "")
    buckets = f"sum by ({by}) (rate({name}_bucket{of}{RATE}))"
    return {f"p{q * 100:.0f}{legend}": f"histogram_quantile({q}, {buckets})" for q in (0.5, 0.99)}


def busy(move: str, by: str = "") -> str:
    """Return the query for the bandwidth of a kind of move while one is running."""
    moved = f"{move}d_bytes" if move.startswith("tier_") else f"{move}_bytes"
    return f"{ours(moved, by)} / sum by ({by}) (rate(vllm:kvtier_{move}_seconds_sum{ENGINE}{RATE}))"


def steps(color: str, bad_from: float) -> dashboard.ThresholdsConfig:
    """Return thresholds: red from a value on."""
    listed = [model.Threshold(color=color), model.Threshold(value=bad_from, color="red")]
    return dashboard.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(listed)


def targets(queries: Queries) -> list[Any]:
    """Return the queries of a panel as Grafana has them, named from A on."""
    return [
        prometheus.Dataquery().expr(query).legend_format(legend).ref_id(chr(ord("A") + number))
        for number, (legend, query) in enumerate(queries.items())
    ]


def graph(title: str, unit: str, queries: Queries, text: str = "", filled: bool = False) -> timeseries.Panel:
    """Return a panel with a line for each series, or with an area for each, one above the other."""
    panel = timeseries.Panel().title(title).description(text).unit(unit).min(0).span(8).height(8)
    panel.datasource(SOURCE).targets(targets(queries)).span_nulls(60_000)
    panel.line_width(2).fill_opacity(35 if filled else 10).gradient_mode(looks.GraphGradientMode.OPACITY)
    panel.show_points(looks.VisibilityMode.NEVER)
    legend = common.VizLegendOptions().show_legend(True).calcs(["lastNotNull", "max"])
    panel.legend(legend.display_mode(looks.LegendDisplayMode.TABLE).placement(looks.LegendPlacement.BOTTOM))
    tooltip = common.VizTooltipOptions().mode(looks.TooltipDisplayMode.MULTI)
    panel.tooltip(tooltip.sort(looks.SortOrder.DESCENDING))
    if filled:
        panel.stacking(common.StackingConfig().mode(looks.StackingMode.NORMAL).group("A"))
    return panel


def area(title: str, unit: str, queries: Queries, text: str = "") -> timeseries.Panel:
    """Return a panel whose series add up."""
    return graph(title, unit, queries, text, filled=True)


def share(title: str, queries: Queries, text: str = "", filled: bool = False) -> timeseries.Panel:
    """Return a panel of shares, up to 100 %."""
    return graph(title, "percentunit", queries, text, filled).max(1)


def colored(panel: timeseries.Panel, **colors: str) -> timeseries.Panel:
    """Give series, by their legends, colors that mean something."""
    for name, color in colors.items():
        fixed = model.DynamicConfigValue(id_val="color", value={"mode": "fixed", "fixedColor": color})
        panel.override_by_name(name, [fixed])
    return panel


def number(title: str, unit: str, query: str, text: str, bad_from: float | None = None) -> stat.Panel:
    """Return a panel with one number, blue; or green, and red from a value on."""
    panel = stat.Panel().title(title).description(text).unit(unit).span(4).height(4).datasource(SOURCE)
    panel.targets(targets({"": query})).no_value("–").graph_mode(looks.BigValueGraphMode.NONE)
    panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    if bad_from is None:
        blue = dashboard.FieldColor().mode(model.FieldColorModeId.FIXED).fixed_color("blue")
        return panel.color_scheme(blue)
    return panel.thresholds(steps("green", bad_from)).color_mode(looks.BigValueColorMode.BACKGROUND)


def timeline(title: str, queries: Queries, words: tuple[str, str]) -> statetimeline.Panel:
    """Return a panel that shows when something was 0, which is good, and when 1."""
    colors = zip("01", words, ("green", "red"), strict=True)
    states = {value: model.ValueMappingResult(text=word, color=color) for value, word, color in colors}
    panel = statetimeline.Panel().title(title).span(8).height(8).datasource(SOURCE).no_value("no tier")
    return panel.targets(targets(queries)).mappings([model.ValueMap(options=states)])


def summary() -> Panels:
    """Return the numbers for a wall."""

    def grown(name: str) -> str:
        return f"sum(increase(vllm:kvtier_{name}_total{ENGINE}[$__range]))"

    hits, mismatches = f"{grown('loaded_tokens')} / {grown('asked_tokens')}", "audit_mismatches_total"
    return [
        number("Hit rate", "percentunit", hits, "Of the prompt tokens that vLLM's own cache lacked."),
        number("Tokens loaded", "short", grown("loaded_tokens"), "Loaded instead of computed."),
        number("Computing saved", "s", grown("saved_seconds"), "Estimated, less the time of the loads."),
        number("Engines", "none", f"count(vllm:kvtier_loads_total{ENGINE})", "Engines with kvtier."),
        number("Suspended tiers", "none", f"sum(vllm:kvtier_tier_suspended{ENGINE})", "Now.", 1),
        number("Audit mismatches", "none", f"sum(vllm:kvtier_{mismatches}{ENGINE})", "Since the start.", 1),
    ]


def tokens() -> Panels:
    """Return where prompts came from, and why not from kvtier."""
    loaded, asked, read = ours("loaded_tokens"), ours("asked_tokens"), ours("load_bytes")
    hits, queries = rate("vllm:prefix_cache_hits"), rate("vllm:prefix_cache_queries")
    sources = {"computed": f"{asked} - {loaded}", "loaded": loaded, "on the GPU": hits}
    pool = f"clamp_min(1 - ({ours('tier_promoted_bytes')} or vector(0)) / {read}, 0) * {loaded} / {asked}"
    below = f"clamp_max({ours('tier_promoted_bytes', 'tier')} / scalar({read}), 1)"
    by_tier = {"host memory": pool, "{{tier}}": f"{below} * scalar({loaded} / {asked})"}
    rates = {"kvtier, of the rest": f"{loaded} / {asked}", "vLLM's cache": f"{hits} / {queries}"}
    begun = {"loads": ours("loads"), "stores": ours("stores")}
    begun |= {"computing is faster": ours("not_worth"), "waits for a chunk": ours("waits")}
    why = "Prompts per second by why their first computed chunk was not loaded: docs/vllm.md lists reasons."
    estimate = "Estimated by bytes: what a tier brought into host memory, of all that was loaded."
    return [
        colored(
            area("Prompt tokens per second, by source", "short", sources), computed="orange", loaded="green"
        ),
        share("Hit rate", rates),
        share("Hit rate of kvtier, by tier", by_tier, estimate, filled=True),
        area("Misses by reason", "reqps", {"{{reason}}": ours("misses", "reason")}, why),
        graph("Computing saved per second", "s", {"{{instance}}": ours("saved_seconds", "instance")}),
        graph("Loads and stores, and loads not begun", "cps", begun),
    ]


def engines() -> Panels:
    """Return vLLM's own metrics."""
    requests = {state: f"sum(vllm:num_requests_{state}{ENGINE})" for state in ("running", "waiting")}
    requests["preemptions/s"] = rate("vllm:num_preemptions")
    usage = {"{{instance}}": f"max by (instance) (vllm:kv_cache_usage_perc{ENGINE})"}
    processed = {"prompt": rate("vllm:prompt_tokens"), "generated": rate("vllm:generation_tokens")}
    return [
        graph("Time to first token", "s", quantiles("vllm:time_to_first_token_seconds")),
        graph("Inter-token latency", "s", quantiles("vllm:inter_token_latency_seconds")),
        graph("Time in the queue", "s", quantiles("vllm:request_queue_time_seconds")),
        graph("Requests", "short", requests),
        share("KV cache usage on the GPU", usage),
        graph("Tokens per second", "short", processed),
    ]


def transfers() -> Panels:
    """Return bytes, bandwidths and times: between GPU and host memory, then of the tiers below."""
    gpu = {f"{move}s": ours(f"{move}_bytes") for move in ("load", "store")}
    gpu |= {f"{move}s, while busy": busy(move) for move in ("load", "store")}
    moves = {"promote": "read", "demote": "written"}
    below = {f"{{{{tier}}}} {word}": ours(f"tier_{move}d_bytes", "tier") for move, word in moves.items()}
    below |= {f"{{{{tier}}}} {word}, busy": busy(f"tier_{move}", "tier") for move, word in moves.items()}
    return [
        graph("GPU ⇄ host memory", "binBps", gpu, "Per second of wall time, and while a transfer ran."),
        graph("Load time", "s", quantiles("vllm:kvtier_load_seconds"), "Of the slowest rank."),
        graph("Store time", "s", quantiles("vllm:kvtier_store_seconds"), "Of the slowest rank."),
        graph("Host memory ⇄ tiers", "binBps", below, "Per second of wall time, and while I/O ran."),
        graph("Time to read from a tier", "s", quantiles("vllm:kvtier_tier_promote_seconds", "tier")),
        graph("Time to write to a tier", "s", quantiles("vllm:kvtier_tier_demote_seconds", "tier")),
    ]


def room() -> Panels:
    """Return how full everything is, what leaves it, and what is not written."""
    pool = f"{shown('vllm:kvtier_used_bytes')} / {shown('vllm:kvtier_capacity_bytes')}"
    capacity = f"({shown('vllm:kvtier_tier_capacity_bytes', TIER)} > 0)"
    disk = f"{shown('vllm:kvtier_tier_used_bytes', TIER)} / {capacity}"
    written = f"sum by ({TIER}) (increase(vllm:kvtier_tier_demoted_bytes_total{ENGINE}[24h])) / {capacity}"
    limit = "By default write_limit is 4: beyond that, kvtier writes only rows that are offered again."
    left = {"pool: evicted": ours("evictions"), "pool: refused": ours("refusals")}
    left["pool: more than hints may keep"] = ours("not_kept")
    left |= {f"{{{{tier}}}}: {word}": ours(f"tier_{word}", "tier") for word in ("evicted", "refused")}
    unwritten = {"left the pool": ours("unwritten"), "{{tier}}: dropped": ours("tier_dropped", "tier")}
    dashed = common.GraphThresholdsStyleConfig().mode(looks.GraphThresholdsStyleMode.DASHED)
    wear = graph("Written in 24 hours, in capacities of the disk", "short", {WHERE: written}, limit)
    return [
        share("Pool in use", {"{{instance}}": pool}),
        share("Disk in use", {WHERE: disk}),
        wear.thresholds(steps("green", 4)).thresholds_style(dashed),
        graph("Chunks evicted and refused", "cps", left, "A tier refuses for want of room or at its limit."),
        graph("Chunks not written", "cps", unwritten),
        graph("Bytes that wait for I/O", "bytes", {WHERE: shown("vllm:kvtier_tier_queued_bytes", TIER)}),
    ]


def health() -> Panels:
    """Return what should be zero."""
    suspended = f"max by (instance, engine, tier) (vllm:kvtier_tier_suspended{ENGINE})"
    tiers = {"failed checks": "tier_failed_checks_total", "errors": "tier_failed_total"}
    tiers |= {"late": "tier_late_total", "stuck now": "tier_stuck"}
    failed = {"loads": "loads_failed_total", "stores": "stores_failed_total"}
    failed |= {"not reported by all ranks": "expired_total", "stores waited for": "flushes_total"}
    audits = {"mismatches": "audit_mismatches_total", "left its namespace": "namespace_departures_total"}
    audits["largest distance"] = "audit_distance"
    resets = {"weight changes": "weight_changes_total", "stale blocks now": "stale_blocks"}
    checks = "Failed checks are rows without the bytes that were sealed."
    leaving = "An engine leaves its namespace after three requests with mismatches: docs/vllm.md#audits."
    return [
        timeline("Suspended tiers", {f"#{{{{engine}}}} {WHERE}": suspended}, ("in use", "suspended")),
        graph("Failures of tiers since the start", "none", totals(tiers, TIER, WHERE), checks),
        graph("Failed transfers since the start", "none", totals(failed), "vLLM computes the tokens."),
        graph("Chunks audited", "cps", {"{{instance}}": ours("audited_chunks", "instance")}),
        graph("Findings of audits since the start", "none", totals(audits), leaving),
        graph("Weight changes since the start, and resets", "none", totals(resets)),
    ]


def index() -> Panels:
    """Return the panels of `kvtier index serve` and of the event streams that it follows."""
    by, worker, source = "exported_instance, rank", "{{exported_instance}} #{{rank}}", "kvtier_index_source_"
    states = {"{{state}}": shown(f"{source}state", "state", INDEX)}
    states["connected"] = f"sum({source}connected{INDEX})"
    losses = ("gaps", "lost_batches", "bad_frames", "pending_overflows", "digest_mismatches")
    lost = {f"{worker} {word}": shown(f"{source}{word}_total", by, INDEX) for word in losses}
    repairs = ("replays", "snapshots", "resets", "reconnects")
    refusals = ("dropped", "refused", "orphans_dropped", "unknown")
    refused = {
        f"{{{{model}}}} {word}": shown(f"kvtier_index_{word}_total", "model", INDEX) for word in refusals
    }
    budget = {"{{model}}": f"kvtier_index_bytes{INDEX} / kvtier_index_budget{INDEX}"}
    queries = quantiles("kvtier_index_request_seconds", of='{path=~"/query.*"}')
    held = {"{{tier}}": shown("kvtier_index_worker_blocks", "tier", INDEX)}
    return [
        colored(graph("Publishers by state", "none", states), exact="green", degraded="red"),
        graph(
            "Lag of events", "s", {worker: f"max by ({by}) ({source}lag_seconds{INDEX})"}, "When applied."
        ),
        graph("Batches of events per second", "cps", {worker: rate(f"{source}batches", by, INDEX)}),
        graph("Lost on the way since the start", "none", lost, "Gaps are repaired; lost batches are not."),
        graph("Repairs per second", "cps", {word: rate(f"{source}{word}", of=INDEX) for word in repairs}),
        graph("Blocks that the index refused since the start", "none", refused),
        area("Blocks held, by tier", "short", held),
        share("Memory of the index, of its budget", budget),
        graph("Time of queries to the index", "s", queries),
    ]


ROWS = {"Summary": summary, "Tokens": tokens, "vLLM": engines, "Transfers": transfers, "Room": room}
ROWS |= {"Health": health, "Event streams and index (kvtier index serve)": index}


def variable(name: str, label: str, matching: str) -> dashboard.QueryVariable:
    """Return a variable with all values of a label."""
    values = f"label_values(vllm:kvtier_loads_total{matching}, {label})"
    made = dashboard.QueryVariable(name).query({"query": values, "refId": name}).datasource(SOURCE)
    made.multi(True).include_all(True).all_value(".*").refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
    return made.sort(model.VariableSort.ALPHABETICAL_ASC)


def build() -> str:
    """Return the dashboard as JSON."""
    made = dashboard.Dashboard("kvtier").uid("kvtier").tags(["kvtier", "vllm"]).readonly()
    made.description("The KV cache below the GPU: what it saves, what it moves, and what is wrong with it.")
    made.refresh("30s").time("now-1h", "now").tooltip(model.DashboardCursorSync.CROSSHAIR)
    made.with_variable(dashboard.DatasourceVariable("datasource").type("prometheus"))
    made.with_variable(variable("job", "job", ""))
    made.with_variable(variable("instance", "instance", '{job=~"$job"}'))
    made.with_variable(variable("model", "model_name", '{job=~"$job",instance=~"$instance"}'))
    panel_id = 0
    for title, panels in ROWS.items():
        made.with_row(dashboard.Row(title).id(panel_id := panel_id + 1))
        for panel in panels():
            made.with_panel(panel.id(panel_id := panel_id + 1))
    return JSONEncoder(sort_keys=True, indent=1).encode(made.build()) + "\n"


if __name__ == "__main__":
    if "--check" not in sys.argv[1:]:
        FILE.write_text(build())
    elif FILE.read_text() != build():
        sys.exit(f"{FILE.name}: expected what dashboard.py makes; run `make deploy`")
