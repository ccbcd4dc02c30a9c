//! Turns events into what a person reads: pure, one event in, pieces of text out.
//!
//! The agent's own words come as [`Piece::Text`], as they arrive; everything else is a [`Piece::Line`]:
//! past tense, with the time it took. Whoever prints decides where each goes. An agent and what it reads
//! may say anything, so no piece holds an escape sequence.

use std::collections::{HashMap, HashSet};

use harvest_proto::{
    Event, EventBody, Timestamp,
    api::{Evidence, Session, SessionState},
    bridge::Exit,
    event::{BootPhase, PhaseStatus, SnapshotKind, TurnOutcome},
};
use serde_json::Value;

use crate::{
    follow::is_declared,
    plain::{plain, plain_line},
    printer::took,
};

/// A piece of text to print.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Piece {
    /// The agent's words, without a line end of their own.
    Text(String),
    /// A whole line, without its line end.
    Line(String),
}

/// Remembers what spans several events.
#[derive(Debug, Default)]
pub(crate) struct Renderer {
    verbose: bool,
    /// Columns of the screen; what of a tool does not fit is cut, and whole in `--json`.
    width: usize,
    /// The agent is in the middle of a line.
    open: bool,
    turn: u32,
    tools: HashMap<String, (String, Timestamp)>,
    /// The pull requests that were told of: whose, and which.
    pulls: HashSet<(Option<String>, u64)>,
    /// Each repository's own, by name: the session has several.
    several: bool,
    /// What tools said is shown to its end.
    full: bool,
}

impl Renderer {
    pub(crate) fn new(verbose: bool, width: usize) -> Self {
        Self { verbose, width, ..Self::default() }
    }

    /// What is known of the session itself.
    pub(crate) fn session(&mut self, session: &Session) {
        self.several = session.repositories.len() > 1;
    }

    /// Shows what tools said to its end.
    pub(crate) fn full(&mut self) {
        self.full = true;
    }

    /// What to print for an event.
    pub(crate) fn event(&mut self, event: &Event) -> Vec<Piece> {
        if let EventBody::TextDelta { text } = &event.body {
            let text = plain(text);
            self.open = !text.ends_with('\n') && (self.open || !text.is_empty());
            return vec![Piece::Text(text)];
        }
        let lines: Vec<String> =
            self.lines(event).iter().flat_map(|line| whole_lines(line)).collect();
        let mut pieces = Vec::new();
        if !lines.is_empty() && std::mem::take(&mut self.open) {
            pieces.push(Piece::Text("\n".into()));
        }
        pieces.extend(lines.into_iter().map(Piece::Line));
        pieces
    }

    /// What ends a half-written line of the agent, when printing ends in the middle of it.
    pub(crate) fn finish(&mut self) -> Option<Piece> {
        std::mem::take(&mut self.open).then(|| Piece::Text("\n".into()))
    }

    fn lines(&mut self, event: &Event) -> Vec<String> {
        match &event.body {
            EventBody::TurnStarted { number, .. } => {
                self.turn = *number;
                self.tools.clear();
                vec![format!("● turn {number}")]
            }
            EventBody::ToolStarted { call, name, input, .. } => {
                let what = cut(&tool(name, input), self.width.saturating_sub(16));
                self.tools.insert(call.clone(), (what, event.at));
                vec![]
            }
            EventBody::ToolEnded { call, ok, output, .. } => {
                self.tool_ended(call, *ok, output, event.at)
            }
            EventBody::TurnEnded { outcome, error, millis, .. } => {
                turn_ended(self.turn, *outcome, error.as_deref(), *millis)
            }
            EventBody::PullOpened { repository, number, url, .. } => {
                // Each push to it is told as an event of its own.
                let is_new = self.pulls.insert((repository.clone(), *number));
                let verb = if is_new { "Opened" } else { "Updated" };
                vec![format!(
                    "{verb} pull request #{number}{}  {url}",
                    self.of(repository.as_deref())
                )]
            }
            EventBody::Evidence(evidence) => {
                verified(evidence, &self.of(evidence.repository.as_deref()))
            }
            body => {
                let said = said(body, self.width);
                if said.is_empty() && self.verbose { aside(body, self.width) } else { said }
            }
        }
    }

    /// ` of web`, where there are several.
    fn of(&self, repository: Option<&str>) -> String {
        let named = repository.filter(|_| self.several);
        named.map_or_else(String::new, |name| format!(" of {name}"))
    }

    fn tool_ended(&mut self, call: &str, ok: bool, output: &str, at: Timestamp) -> Vec<String> {
        let (what, began) = self.tools.remove(call).unwrap_or_else(|| ("tool".into(), at));
        let millis = u64::try_from(at.since(began).as_millis()).unwrap_or(u64::MAX);
        let mark = if ok { '✓' } else { '✗' };
        let output = plain(output);
        let line = format!("  {mark} {what} ({})", took(millis));
        if self.full {
            return with_tail(line, &output);
        }
        let last = output.lines().map(str::trim).rfind(|line| !line.is_empty()).unwrap_or("");
        if last.is_empty() {
            return vec![line];
        }
        let both = format!("{line} → {last}");
        match both.chars().count() <= self.width {
            true => vec![both],
            false => vec![format!("{line}\n→ {}", cut(last, self.width.saturating_sub(7)))],
        }
    }
}

/// Events that people want to see.
fn said(body: &EventBody, width: usize) -> Vec<String> {
    let quoted = |text: &str| cut(first_line(text), width.saturating_sub(12));
    match body {
        EventBody::StateChanged { state, reason, detail } => {
            state_changed(*state, reason, detail.as_deref())
        }
        EventBody::Waiting { position } if *position > 1 => {
            vec![format!("Number {position} in line")]
        }
        EventBody::PromptQueued { text, .. } => vec![format!("Queued “{}”", quoted(text))],
        EventBody::PromptCancelled { prompt } => vec![format!("Cancelled {prompt}")],
        EventBody::PromptMoved { prompt, position } => {
            vec![format!("Moved {prompt} to place {position}")]
        }
        EventBody::SandboxStarted { sandbox, from, millis, .. } => {
            vec![format!("Started {sandbox} from {from} in {}", took(*millis))]
        }
        EventBody::SandboxEnded { sandbox, reason } => vec![format!("Ended {sandbox}: {reason}")],
        EventBody::BootPhase { phase, status, millis, tail } => {
            boot(*phase, *status, *millis, tail.as_deref())
        }
        EventBody::RequestOpened { question, options, .. } => asked(question, options),
        EventBody::RequestClosed { answer: Some(answer), .. } => {
            vec![format!("Answered “{}”", quoted(answer))]
        }
        EventBody::Retry { attempt, after_millis, status } => {
            let status = status.map_or_else(String::new, |status| format!(", status {status}"));
            vec![format!(
                "Waiting {} for the model (attempt {attempt}{status})",
                took(*after_millis)
            )]
        }
        EventBody::Compacted {} => vec!["Compacted the conversation".into()],
        EventBody::AgentExited { exit, tail, restarts } => {
            let next = if *restarts { "starting it again" } else { "not started again" };
            with_tail(format!("Agent ended by itself ({}); {next}", exit_words(*exit)), tail)
        }
        EventBody::SnapshotTaken { snapshot, kind, millis } => {
            vec![format!("Kept {snapshot} ({}) in {}", snapshot_words(*kind), took(*millis))]
        }
        EventBody::Restored { detail, .. } => vec![format!("Restored: {detail}")],
        EventBody::EgressRefused { name, reason } => {
            vec![format!("Refused a connection to {name}: {reason}")]
        }
        EventBody::Pushed { repository, branch, commit } => {
            vec![format!("Pushed {branch} at {} to {repository}", short(commit))]
        }
        EventBody::PushRefused { repository, reason } => {
            vec![format!("Refused a push to {repository}: {reason}")]
        }
        EventBody::Warning { message } => vec![format!("warning: {message}")],
        _ => vec![],
    }
}

/// Events that only `--verbose` shows.
fn aside(body: &EventBody, width: usize) -> Vec<String> {
    match body {
        EventBody::StateChanged { state, reason, .. } => {
            vec![format!("State {}: {reason}", state.as_str())]
        }
        EventBody::ThoughtDelta { text } => {
            text.lines().map(|line| format!("  ~ {line}")).collect()
        }
        EventBody::ModelCall { upstream, model, status, usage, millis } => vec![format!(
            "Called {model} ({upstream}, {status}) in {}: {} in, {} out",
            took(*millis),
            usage.input_tokens + usage.cache_read_tokens + usage.cache_write_tokens,
            usage.output_tokens
        )],
        EventBody::BootPhase { phase, status, .. } => {
            vec![format!("{phase:?}: {status:?}").to_lowercase()]
        }
        EventBody::AgentRaw { line } => vec![format!("  | {}", cut(line, width.saturating_sub(5)))],
        _ => vec![],
    }
}

fn state_changed(state: SessionState, reason: &str, detail: Option<&str>) -> Vec<String> {
    // The rest of a long detail was told by the event that led here.
    let why = first_line(detail.unwrap_or(reason));
    match state {
        SessionState::Failed => vec![format!("Failed: {why}")],
        SessionState::Paused if why == "paused" => vec!["Paused".into()],
        SessionState::Paused => vec![format!("Paused: {why}")],
        SessionState::Archived => vec!["Archived".into()],
        // Every session begins so.
        SessionState::Queued if reason != "created" => vec![format!("Waiting for a place: {why}")],
        _ => vec![],
    }
}

fn boot(
    phase: BootPhase,
    status: PhaseStatus,
    millis: Option<u64>,
    tail: Option<&str>,
) -> Vec<String> {
    let time = took(millis.unwrap_or(0));
    let what = match phase {
        // Nobody waits for these.
        BootPhase::Starting | BootPhase::Ready if status == PhaseStatus::Done => return vec![],
        BootPhase::Starting => "Started the supervisor",
        BootPhase::Sync => "Synced the checkout",
        BootPhase::Setup => "Ran .harvest/setup.sh",
        BootPhase::Start => "Ran .harvest/start.sh",
        BootPhase::Agent => "Started the agent",
        BootPhase::Ready => "Ready",
    };
    match status {
        PhaseStatus::Done => vec![format!("{what} in {time}")],
        PhaseStatus::Failed => {
            let step = format!("{phase:?}").to_lowercase();
            with_tail(format!("Failed to boot at `{step}` after {time}"), tail.unwrap_or(""))
        }
        PhaseStatus::Started | PhaseStatus::Skipped => vec![],
    }
}

fn turn_ended(turn: u32, outcome: TurnOutcome, error: Option<&str>, millis: u64) -> Vec<String> {
    let what = match outcome {
        TurnOutcome::Completed => "Completed",
        TurnOutcome::Failed => "Failed",
        TurnOutcome::Stopped => "Stopped",
        TurnOutcome::Interrupted => "Interrupted",
    };
    let error = error.map_or_else(String::new, |error| format!(": {error}"));
    vec![format!("{what} turn {turn} in {}{error}", took(millis))]
}

/// `of` names the repository where that is not clear.
fn verified(evidence: &Evidence, of: &str) -> Vec<String> {
    let (commit, time) = (format!("{}{of}", short(&evidence.commit)), took(evidence.millis));
    if evidence.passed {
        return vec![format!(
            "Verified {commit} in a fresh sandbox: {} passed in {time}",
            evidence.check
        )];
    }
    if !is_declared(evidence) {
        return vec![format!("Did not verify {commit}: {}", evidence.tail)];
    }
    let how = exit_words(evidence.exit);
    let line =
        format!("Refuted {commit} in a fresh sandbox: {} failed ({how}) in {time}", evidence.check);
    with_tail(line, &evidence.tail)
}

fn asked(question: &str, options: &[String]) -> Vec<String> {
    let options = options.iter().map(|option| format!("  - {option}"));
    std::iter::once(format!("? {question}")).chain(options).collect()
}

/// How a process ended, in words.
pub(crate) fn exit_words(exit: Exit) -> String {
    match exit {
        Exit::Code(code) => format!("exit {code}"),
        Exit::Signal(signal) => format!("signal {signal}"),
        Exit::Oom => "out of memory".into(),
        Exit::Timeout => "out of time".into(),
        Exit::Killed => "killed".into(),
    }
}

fn snapshot_words(kind: SnapshotKind) -> &'static str {
    match kind {
        SnapshotKind::Turn => "end of turn",
        SnapshotKind::Pause => "pause",
        SnapshotKind::Recovered => "recovered",
        SnapshotKind::Build => "build",
    }
}

/// A tool and the one argument that says what it does.
fn tool(name: &str, input: &Value) -> String {
    let known =
        ["command", "file_path", "path", "pattern", "url", "query", "description", "prompt"];
    let argument = known.iter().find_map(|key| input.get(key)?.as_str()).map(first_line);
    match argument {
        Some(argument) => plain_line(&format!("{name} {argument}")),
        None => plain_line(name),
    }
}

/// A text as lines of a screen; only the first stands at the margin, where our own words do.
fn whole_lines(text: &str) -> Vec<String> {
    let text = plain(text);
    let mut lines = text.lines();
    let first = lines.next().unwrap_or("").to_owned();
    std::iter::once(first).chain(lines.map(|line| format!("    {line}"))).collect()
}

fn with_tail(line: String, tail: &str) -> Vec<String> {
    std::iter::once(line).chain(tail.lines().map(|line| format!("  | {line}"))).collect()
}

/// The first line of a text.
pub(crate) fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or("")
}

/// A commit as people quote it.
pub(crate) fn short(commit: &str) -> &str {
    commit.get(..7).unwrap_or(commit)
}

/// At most `width` characters.
pub(crate) fn cut(text: &str, width: usize) -> String {
    match text.char_indices().nth(width) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests;
