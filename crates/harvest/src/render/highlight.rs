//! The colours of rendered lines. Pure.

use harvest_proto::{
    EventBody,
    api::{CheckOutcome, SessionState},
    event::{PhaseStatus, TurnOutcome},
};

use crate::style::Palette;

/// Styles the words at the start of a line that tell how something went.
pub(super) fn highlight(style: Palette, body: &EventBody, line: &str) -> String {
    let (words, paint): (&str, fn(Palette, &str) -> String) = match body {
        EventBody::TurnStarted { .. } => (line, Palette::bold),
        EventBody::ToolEnded { ok: true, .. } => ("  ✓", Palette::ok),
        EventBody::ToolEnded { ok: false, .. } => ("  ✗", Palette::fail),
        EventBody::TurnEnded { outcome: TurnOutcome::Completed, .. } => ("Completed", Palette::ok),
        EventBody::TurnEnded { outcome: TurnOutcome::Failed, .. } => ("Failed", Palette::fail),
        EventBody::TurnEnded { .. } => (first_word(line), Palette::warn),
        EventBody::Evidence(evidence) => match evidence.outcome {
            CheckOutcome::Passed => ("Check passed", Palette::ok),
            CheckOutcome::Failed => ("Check failed", Palette::fail),
            CheckOutcome::NoneDeclared => ("Not checked", Palette::warn),
        },
        EventBody::StateChanged { state: SessionState::Failed, .. } => ("Failed", Palette::fail),
        EventBody::BootPhase { status: PhaseStatus::Failed, .. }
        | EventBody::AgentExited { .. } => (line, Palette::fail),
        EventBody::RequestOpened { .. } => (line, Palette::bold),
        EventBody::Warning { .. } => ("warning:", Palette::warn),
        EventBody::Blocked { .. } => ("Blocked", Palette::warn),
        EventBody::SyncEnded { .. } => ("Conflict", Palette::warn),
        EventBody::EgressRefused { .. } | EventBody::PushRefused { .. } => {
            ("Refused", Palette::warn)
        }
        EventBody::SandboxStarted { .. } | EventBody::BootPhase { .. } => (line, Palette::dim),
        _ => return line.to_owned(),
    };
    match line.strip_prefix(words) {
        Some(rest) => paint(style, words) + rest,
        None => line.to_owned(),
    }
}

fn first_word(line: &str) -> &str {
    line.split(' ').next().unwrap_or("")
}
