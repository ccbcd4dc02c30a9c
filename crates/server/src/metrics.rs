//! Metrics in the Prometheus text format. Labels are fixed values only (route templates, states,
//! reasons), never client input.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use axum::{
    extract::{MatchedPath, Request, State},
    http::Method,
    middleware::Next,
    response::Response,
};
use harvest_session::{Histogram, ServerStats};

use crate::ServerState;

/// Response counts and latencies by method and route.
#[derive(Debug, Default)]
pub(crate) struct RequestMetrics(Mutex<BTreeMap<(&'static str, String), RouteMetrics>>);

#[derive(Debug, Clone, Default)]
struct RouteMetrics {
    statuses: BTreeMap<u16, u64>,
    latency: Histogram,
}

impl RequestMetrics {
    fn count(&self, method: &Method, route: &str, status: u16, latency: Duration) {
        let mut routes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let route = routes.entry((method_label(method), route.to_owned())).or_default();
        *route.statuses.entry(status).or_default() += 1;
        route.latency.observe(latency);
    }
}

/// Counts a response and its time to first byte.
pub(crate) async fn count(
    State(state): State<ServerState>,
    request: Request,
    next: Next,
) -> Response {
    let route = route(&request).to_owned();
    let (method, started) = (request.method().clone(), Instant::now());
    let response = next.run(request).await;
    state.request_metrics.count(&method, &route, response.status().as_u16(), started.elapsed());
    response
}

/// The route template of a request.
pub(crate) fn route(request: &Request) -> &str {
    request.extensions().get::<MatchedPath>().map_or("none", MatchedPath::as_str)
}

/// Clients may send arbitrary methods: unknown ones share a label.
fn method_label(method: &Method) -> &'static str {
    let known = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"];
    known.into_iter().find(|known| method == known).unwrap_or("other")
}

/// The metrics page.
pub(crate) fn page(stats: &ServerStats, requests: &RequestMetrics) -> String {
    let mut page = MetricsPage::default();
    sessions(&mut page, stats);
    let routes = requests.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
    page.family("harvest_requests_total", "counter", "Responses by route and status");
    for ((method, path), route) in &routes {
        for (status, number) in &route.statuses {
            let labels = [("method", *method), ("route", path), ("status", &status.to_string())];
            page.sample("harvest_requests_total", &labels, *number);
        }
    }
    let help = "Time from request headers to response headers";
    page.family("harvest_request_seconds", "histogram", help);
    for ((method, path), route) in &routes {
        let labels = [("method", *method), ("route", path)];
        page.histogram("harvest_request_seconds", &labels, &route.latency);
    }
    if let Some(bytes) = resident_bytes() {
        page.one("harvest_resident_bytes", "gauge", "Resident memory of the server process", bytes);
    }
    page.text
}

fn sessions(page: &mut MetricsPage, stats: &ServerStats) {
    let counts = &stats.counts;
    page.family("harvest_build", "gauge", "Always 1; the version is a label");
    page.sample("harvest_build", &[("version", env!("CARGO_PKG_VERSION"))], 1);
    page.family("harvest_sessions", "gauge", "Sessions by state");
    for (state, number) in &stats.sessions {
        page.sample("harvest_sessions", &[("state", state.as_str())], *number);
    }
    page.family("harvest_state_changes_total", "counter", "Session state changes by reason");
    for ((state, reason), number) in &counts.changes {
        let labels = [("state", *state), ("reason", *reason)];
        page.sample("harvest_state_changes_total", &labels, *number);
    }
    page.one("harvest_prompts_waiting", "gauge", "Queued prompts", stats.prompts_waiting);
    if let Some(sandboxes) = stats.sandboxes {
        let help = "Running sandboxes of sessions, builds and checks";
        page.one("harvest_sandboxes", "gauge", help, sandboxes);
    }
    if let Some(standby) = stats.standby {
        for (name, kind, help, value) in [
            ("ready", "gauge", "Standby sandboxes ready for a start", standby.ready),
            ("prepared_total", "counter", "Standby sandboxes prepared", standby.preforked),
            ("used_total", "counter", "Starts that used a standby sandbox", standby.used),
            ("missed_total", "counter", "Starts without a standby sandbox", standby.missed),
        ] {
            page.one(&format!("harvest_standby_{name}"), kind, help, value);
        }
    }
    for (name, kind, help, value) in [
        ("ready", "gauge", "Sandboxes of the warm pool that a session can take", stats.pool.ready),
        ("starting", "gauge", "Sandboxes of the warm pool that start", stats.pool.starting),
        ("started_total", "counter", "Sandboxes started for the warm pool", stats.pool.started),
        ("claimed_total", "counter", "Sessions that took one of them", stats.pool.claimed),
    ] {
        page.one(&format!("harvest_pool_{name}"), kind, help, value);
    }
    page.one("harvest_events_total", "counter", "Events stored", counts.events);
    let histograms = [
        ("harvest_queue_wait_seconds", "Time prompts spent in the queue", &counts.waits),
        ("harvest_start_seconds", "Sandbox start time", &counts.starts),
        ("harvest_snapshot_seconds", "Snapshot time", &counts.snapshots),
    ];
    for (name, help, histogram) in histograms {
        page.family(name, "histogram", help);
        page.histogram(name, &[], histogram);
    }
    page.family("harvest_turn_seconds", "histogram", "Turn duration by outcome");
    for (outcome, histogram) in &counts.turns {
        page.histogram("harvest_turn_seconds", &[("outcome", outcome)], histogram);
    }
}

fn resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok().map(|kilobytes| kilobytes * 1024)
}

/// A page in the text format, version 0.0.4.
#[derive(Default)]
struct MetricsPage {
    text: String,
}

impl MetricsPage {
    fn family(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn one(&mut self, name: &str, kind: &str, help: &str, value: u64) {
        self.family(name, kind, help);
        self.sample(name, &[], value);
    }

    fn sample(&mut self, name: &str, labels: &[(&str, &str)], value: impl std::fmt::Display) {
        let labels: Vec<String> =
            labels.iter().map(|(label, value)| format!("{label}=\"{}\"", escaped(value))).collect();
        let labels =
            if labels.is_empty() { String::new() } else { format!("{{{}}}", labels.join(",")) };
        let _ = writeln!(self.text, "{name}{labels} {value}");
    }

    fn histogram(&mut self, name: &str, labels: &[(&str, &str)], histogram: &Histogram) {
        for (bound, number) in histogram.buckets() {
            let bound = if bound.is_finite() { bound.to_string() } else { "+Inf".to_owned() };
            let labels = [labels, &[("le", &bound)]].concat();
            self.sample(&format!("{name}_bucket"), &labels, number);
        }
        self.sample(&format!("{name}_sum"), labels, histogram.sum().as_secs_f64());
        self.sample(&format!("{name}_count"), labels, histogram.count());
    }
}

fn escaped(value: &str) -> String {
    value.replace('\\', r"\\").replace('"', "\\\"").replace('\n', r"\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_escaped_and_unknown_methods_collapsed() {
        let mut page = MetricsPage::default();
        page.sample("x", &[("a", "b\"} 1\ny 2\\")], 3);
        assert_eq!(page.text, "x{a=\"b\\\"} 1\\ny 2\\\\\"} 3\n");
        assert_eq!(method_label(&Method::from_bytes(b"BREW").unwrap()), "other");
    }
}
