//! What the server counts about itself, as Prometheus reads it. Labels are words of ours only: routes as
//! they are written down, states, reasons; never what somebody sent.

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
use harvest_session::{Histogram, Vitals};

use crate::ServerState;

/// Answers, counted by route and status, with what they took.
#[derive(Debug, Default)]
pub(crate) struct Answers(Mutex<BTreeMap<(&'static str, String), Route>>);

#[derive(Debug, Clone, Default)]
struct Route {
    statuses: BTreeMap<u16, u64>,
    took: Histogram,
}

impl Answers {
    fn count(&self, method: &Method, route: &str, status: u16, took: Duration) {
        let mut routes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let route = routes.entry((known(method), route.to_owned())).or_default();
        *route.statuses.entry(status).or_default() += 1;
        route.took.observe(took);
    }
}

/// Counts an answer, and what it took until its head was out.
pub(crate) async fn count(
    State(state): State<ServerState>,
    request: Request,
    next: Next,
) -> Response {
    let route = route(&request).to_owned();
    let (method, began) = (request.method().clone(), Instant::now());
    let response = next.run(request).await;
    state.answers.count(&method, &route, response.status().as_u16(), began.elapsed());
    response
}

/// The route a request was sent to, as it is written down.
pub(crate) fn route(request: &Request) -> &str {
    request.extensions().get::<MatchedPath>().map_or("none", MatchedPath::as_str)
}

/// A method anyone may invent must not become a label.
fn known(method: &Method) -> &'static str {
    match method.as_str() {
        "GET" => "GET",
        "HEAD" => "HEAD",
        "POST" => "POST",
        "PUT" => "PUT",
        "PATCH" => "PATCH",
        "DELETE" => "DELETE",
        _ => "other",
    }
}

/// The whole page.
pub(crate) fn page(vitals: &Vitals, answers: &Answers) -> String {
    let mut page = Page::default();
    sessions(&mut page, vitals);
    let routes = answers.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
    page.family("harvest_requests_total", "counter", "Answers, by route and status");
    for ((method, path), route) in &routes {
        for (status, number) in &route.statuses {
            let labels = [("method", *method), ("route", path), ("status", &status.to_string())];
            page.sample("harvest_requests_total", &labels, *number);
        }
    }
    page.family("harvest_request_seconds", "histogram", "From a request's head to its answer's");
    for ((method, path), route) in &routes {
        page.histogram(
            "harvest_request_seconds",
            &[("method", method), ("route", path)],
            &route.took,
        );
    }
    if let Some(bytes) = resident_bytes() {
        page.one("harvest_resident_bytes", "gauge", "Memory of the server's process", bytes);
    }
    page.text
}

fn sessions(page: &mut Page, vitals: &Vitals) {
    let counts = &vitals.counts;
    page.family("harvest_build", "gauge", "1, and the version as a label");
    page.sample("harvest_build", &[("version", env!("CARGO_PKG_VERSION"))], 1);
    page.family("harvest_sessions", "gauge", "Sessions there are, by state");
    for (state, number) in &vitals.sessions {
        page.sample("harvest_sessions", &[("state", state.as_str())], *number);
    }
    page.family(
        "harvest_state_changes_total",
        "counter",
        "Changes of a session's state, by reason",
    );
    for ((state, reason), number) in &counts.changes {
        page.sample(
            "harvest_state_changes_total",
            &[("state", state), ("reason", reason)],
            *number,
        );
    }
    page.one(
        "harvest_prompts_waiting",
        "gauge",
        "Prompts that wait for their turn",
        vitals.prompts_waiting,
    );
    if let Some(sandboxes) = vitals.sandboxes {
        page.one(
            "harvest_sandboxes",
            "gauge",
            "Sandboxes of sessions, builds and checks",
            sandboxes,
        );
    }
    if let Some(seeds) = vitals.seeds {
        page.one("harvest_seeds_ready", "gauge", "Seeds that wait for a start", seeds.ready);
        page.one("harvest_seeds_grown_total", "counter", "Seeds grown ahead of time", seeds.grown);
        page.one("harvest_seeds_used_total", "counter", "Starts that took a seed", seeds.used);
        page.one(
            "harvest_seeds_missed_total",
            "counter",
            "Starts that found no seed",
            seeds.missed,
        );
    }
    page.one("harvest_events_total", "counter", "Events stored", counts.events);
    let plain = [
        ("harvest_queue_wait_seconds", "What prompts waited for their turn", &counts.waits),
        ("harvest_start_seconds", "What starting a sandbox took", &counts.starts),
        ("harvest_snapshot_seconds", "What taking a snapshot took", &counts.snapshots),
    ];
    for (name, help, histogram) in plain {
        page.family(name, "histogram", help);
        page.histogram(name, &[], histogram);
    }
    page.family("harvest_turn_seconds", "histogram", "What turns took, by outcome");
    for (outcome, histogram) in &counts.turns {
        page.histogram("harvest_turn_seconds", &[("outcome", outcome)], histogram);
    }
}

fn resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok().map(|kilobytes| kilobytes * 1024)
}

/// The text format, version 0.0.4.
#[derive(Default)]
struct Page {
    text: String,
}

impl Page {
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
    fn a_label_cannot_end_its_line_and_an_invented_method_is_no_label() {
        let mut page = Page::default();
        page.sample("x", &[("a", "b\"} 1\ny 2\\")], 3);
        assert_eq!(page.text, "x{a=\"b\\\"} 1\\ny 2\\\\\"} 3\n");
        assert_eq!(known(&Method::from_bytes(b"BREW").unwrap()), "other");
    }
}
