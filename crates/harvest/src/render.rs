//! Renders events as text for people. Pure: one event in, pieces of text out.
//!
//! The agent's text comes as [`Piece::Text`] while it streams; everything else is a
//! [`Piece::Line`]. The caller decides where each goes. Events contain untrusted text, so the only
//! escape sequences in a piece are the styles of its first words.

mod activity;
mod highlight;
mod markdown;
mod syncs;
mod text;
mod tool;

use std::collections::HashSet;

use self::{
    activity::ActivityTracker,
    highlight::highlight,
    markdown::Markdown,
    text::{describe_agent_exit, indent_continuation, with_tail},
    tool::ResultSummary,
};
pub(crate) use self::{
    activity::{Activity, phase_label},
    markdown::markdown_text,
    syncs::synced_checkout,
    text::{describe_exit, describe_snapshot_kind, first_line, short_commit, truncate},
};
use crate::{
    printer::human_millis,
    sanitize::{sanitize, sanitize_line},
    style::Palette,
};
use harvest_proto::{
    Event, EventBody, RepositoryName, StateReason, Timestamp,
    api::{CheckOutcome, Evidence, Session, SessionState},
    event::{
        BootPhase, McpState, PhaseStatus, PlanStep, StartWay, StepStatus, SyncedCheckout,
        TurnOutcome,
    },
};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Piece {
    /// Part of the agent's text, without an added line end.
    Text(String),
    /// A line without its line end.
    Line(String),
}

/// The state that spans several events.
#[derive(Debug, Default)]
pub(crate) struct Renderer {
    verbose: bool,
    /// The styles of lines.
    style: Palette,
    /// Columns of the terminal; longer tool lines are truncated.
    width: usize,
    /// Whether the agent's text ends in the middle of a line.
    mid_line: bool,
    /// Renders the agent's text for a terminal; without it the text streams as it comes.
    markdown: Option<Markdown>,
    /// The agent's text since the last line end, which is rendered once it is complete.
    partial: String,
    /// The number of the turn, unless it began before the first event.
    turn: Option<u32>,
    /// Whether the next prompt is the answer to a question.
    question_open: bool,
    /// The running tools, oldest first.
    tools: Vec<RunningTool>,
    activity: ActivityTracker,
    /// Repository and number of the pull requests shown so far.
    pull_requests: HashSet<(RepositoryName, u64)>,
    /// Whether lines name their repository.
    many_repositories: bool,
    /// Whether tool output is shown in full.
    pub(crate) full: bool,
}

#[derive(Debug)]
struct RunningTool {
    call: String,
    what: String,
    summary: ResultSummary,
    /// The last line of its output so far.
    output: String,
    since: Timestamp,
}

impl Renderer {
    pub(crate) fn new(verbose: bool, width: usize, style: Palette) -> Self {
        Self { verbose, width, style, ..Self::default() }
    }

    /// Renders the agent's Markdown with these styles.
    pub(crate) fn render_markdown(&mut self, style: Palette) {
        self.markdown = Some(Markdown::new(style));
    }

    pub(crate) fn session(&mut self, session: &Session) {
        self.many_repositories = session.repositories.len() > 1;
    }

    /// What the session is doing now. Nothing while the terminal's last line is needed: for the
    /// agent's text that ends in the middle of a line, or for the answer to a question.
    pub(crate) fn activity(&self) -> Option<Activity> {
        if self.mid_line || self.activity.asks() {
            return None;
        }
        if !self.partial.is_empty() {
            // The end of the text, with room for the spinner.
            let shown = self.width.saturating_sub(12);
            let hidden = self.partial.chars().count().saturating_sub(shown);
            return Some(Activity {
                what: self.partial.chars().skip(hidden).collect(),
                since: None,
            });
        }
        let Some(RunningTool { what, output, since, .. }) = self.tools.last() else {
            return self.activity.current().cloned();
        };
        let what = match self.tools.len() - 1 {
            0 if output.is_empty() => what.clone(),
            // Room for the spinner and the clock.
            0 => truncate(&format!("{what} → {output}"), self.width.saturating_sub(16)),
            others => format!("{what} (and {others} more)"),
        };
        Some(Activity { what, since: Some(*since) })
    }

    pub(crate) fn event(&mut self, event: &Event) -> Vec<Piece> {
        self.activity.event(event);
        if let EventBody::TextDelta { text } = &event.body {
            return self.text(sanitize(text));
        }
        let mut lines: Vec<String> =
            self.lines(event).iter().flat_map(|line| indent_continuation(line)).collect();
        if let Some(first) = lines.first_mut() {
            *first = highlight(self.style, &event.body, first);
        }
        let mut pieces = Vec::new();
        // A started tool is shown on the live line, which needs the terminal's last line.
        let ends_text = !lines.is_empty() || matches!(event.body, EventBody::ToolStarted { .. });
        if ends_text {
            pieces.extend(self.finish());
        }
        pieces.extend(lines.into_iter().map(Piece::Line));
        pieces
    }

    /// Takes note of an event that is not shown.
    pub(crate) fn skip(&mut self, event: &Event) {
        self.event(event);
        self.finish();
    }

    /// Ends an unfinished line of the agent's text.
    pub(crate) fn finish(&mut self) -> Option<Piece> {
        if !self.partial.is_empty() {
            return self.text("\n".to_owned()).pop();
        }
        std::mem::take(&mut self.mid_line).then(|| Piece::Text("\n".into()))
    }

    /// Part of the agent's text: unchanged, or its complete lines rendered.
    fn text(&mut self, text: String) -> Vec<Piece> {
        let Some(markdown) = &mut self.markdown else {
            self.mid_line = !text.ends_with('\n') && (self.mid_line || !text.is_empty());
            return vec![Piece::Text(text)];
        };
        self.partial += &text;
        let Some((complete, rest)) = self.partial.rsplit_once('\n') else { return Vec::new() };
        let lines: String = complete.split('\n').map(|line| markdown.line(line) + "\n").collect();
        self.partial = rest.to_owned();
        vec![Piece::Text(lines)]
    }

    fn lines(&mut self, event: &Event) -> Vec<String> {
        match &event.body {
            EventBody::TurnStarted { number, .. } => {
                self.turn = Some(*number);
                self.tools.clear();
                self.markdown.iter_mut().for_each(Markdown::end);
                vec![format!("● turn {number}")]
            }
            EventBody::ToolStarted { call, name, kind, input, blob, .. } => {
                let what = truncate(&tool::title(name, input), self.width.saturating_sub(16));
                let summary = ResultSummary::of(*kind, input, blob.is_some());
                let (call, output, since) = (call.clone(), String::new(), event.at);
                self.tools.push(RunningTool { call, what, summary, output, since });
                vec![]
            }
            EventBody::ToolOutput { call, text } => {
                let last = text.lines().rfind(|line| !line.trim().is_empty()).map(sanitize_line);
                let running = self.tools.iter_mut().find(|tool| tool.call == *call);
                if let (Some(tool), Some(last)) = (running, last) {
                    tool.output = last;
                }
                vec![]
            }
            EventBody::ToolEnded { call, ok, output, .. } => {
                self.tool_ended(call, *ok, output, event.at)
            }
            EventBody::PromptQueued { .. } if std::mem::take(&mut self.question_open) => vec![],
            EventBody::RequestOpened { question, options, .. } => {
                self.question_open = true;
                question_lines(question, options)
            }
            EventBody::TurnEnded { outcome, error, millis, .. } => {
                self.question_open = false;
                self.tools.clear();
                turn_ended(self.turn, *outcome, error.as_deref(), *millis)
            }
            EventBody::PrOpened { repository, number, url, .. } => {
                // Each further push to it repeats the event.
                let is_new = self.pull_requests.insert((repository.clone(), *number));
                let verb = if is_new { "Opened" } else { "Updated" };
                vec![format!(
                    "{verb} pull request #{number}{}  {url}",
                    self.repository_suffix(repository)
                )]
            }
            EventBody::PrChanged { repository, number, state, .. } => {
                vec![format!(
                    "Pull request #{number}{} is {state}",
                    self.repository_suffix(repository)
                )]
            }
            EventBody::Evidence(evidence) => {
                check_result(evidence, &self.repository_suffix(&evidence.repository))
            }
            body => {
                let lines = default_lines(body, self.width);
                if lines.is_empty() && self.verbose {
                    verbose_lines(body, self.width)
                } else {
                    lines
                }
            }
        }
    }

    /// ` of acme/web`, if the session has several repositories.
    fn repository_suffix(&self, repository: &RepositoryName) -> String {
        if self.many_repositories { format!(" of {repository}") } else { String::new() }
    }

    fn tool_ended(&mut self, call: &str, ok: bool, output: &str, at: Timestamp) -> Vec<String> {
        let running = self.tools.iter().position(|tool| tool.call == call);
        let (what, summary, time) = match running.map(|position| self.tools.remove(position)) {
            Some(RunningTool { what, summary, since, .. }) => {
                let millis = u64::try_from(at.since(since).as_millis()).unwrap_or(u64::MAX);
                (what, summary, format!(" ({})", human_millis(millis)))
            }
            None => ("A tool".to_owned(), ResultSummary::Other, String::new()),
        };
        let mark = if ok { '✓' } else { '✗' };
        let output = sanitize(output);
        let line = format!("  {mark} {what}{time}");
        if self.full {
            return with_tail(line, &output);
        }
        let Some(result) = summary.result(ok, &output).filter(|result| !result.is_empty()) else {
            return vec![line];
        };
        let both = format!("{line} → {result}");
        match both.chars().count() <= self.width {
            true => vec![both],
            false => {
                vec![format!("{line}\n→ {}", truncate(&result, self.width.saturating_sub(7)))]
            }
        }
    }
}

/// The lines of an event by itself.
pub(crate) fn event_lines(body: &EventBody) -> Vec<String> {
    default_lines(body, 80)
}

/// Lines that are always shown.
fn default_lines(body: &EventBody, width: usize) -> Vec<String> {
    let quoted = |text: &str| truncate(first_line(text), width.saturating_sub(12));
    match body {
        EventBody::StateChanged { state, reason, detail } => {
            state_changed(*state, *reason, detail.as_deref())
        }
        EventBody::Waiting { position } if *position > 1 => {
            vec![format!("Position {position} in the queue for a slot")]
        }
        EventBody::PromptQueued { text, attachments, .. } => {
            let images = match attachments.len() {
                0 => String::new(),
                1 => " with an image".to_owned(),
                number => format!(" with {number} images"),
            };
            vec![format!("Queued “{}”{images}", quoted(text))]
        }
        EventBody::PromptCancelled { prompt } => vec![format!("Removed {prompt} from the queue")],
        EventBody::PromptMoved { prompt, position } => {
            vec![format!("Moved {prompt} to position {position}")]
        }
        EventBody::SandboxStarted { sandbox, way: StartWay::Pool, millis, .. } => {
            vec![format!("Took {sandbox} from the warm pool in {}", human_millis(*millis))]
        }
        EventBody::SandboxStarted { sandbox, from, millis, .. } => {
            vec![format!("Started {sandbox} from {from} in {}", human_millis(*millis))]
        }
        EventBody::SandboxEnded { sandbox, reason } => vec![format!("Stopped {sandbox}: {reason}")],
        EventBody::BootPhase { failure: Some(failure), tail, .. } => {
            with_tail(failure.message.clone(), tail.as_deref().unwrap_or_default())
        }
        EventBody::BootPhase { phase, status: PhaseStatus::Done, millis, .. } => {
            boot_phase(*phase, *millis)
        }
        EventBody::Synced { checkouts, .. } => checkouts.iter().filter_map(moved).collect(),
        EventBody::SyncEnded { checkouts, .. } => {
            checkouts.iter().flat_map(synced_checkout).collect()
        }
        EventBody::WorkSaved(saved) => syncs::saved_work(saved),
        EventBody::InstallStep { folder, command, millis, failure, tail, .. } => {
            install_step((folder, command), *millis, failure.as_deref(), tail)
        }
        EventBody::RequestClosed { answer: Some(answer), .. } => {
            vec![format!("Answered “{}”", quoted(answer))]
        }
        EventBody::Retry { attempt, after_millis, status } => {
            let status = status.map_or_else(String::new, |status| format!(", status {status}"));
            vec![format!(
                "Waiting {} for the model (attempt {attempt}{status})",
                human_millis(*after_millis)
            )]
        }
        EventBody::Plan { steps } => plan(steps, width),
        EventBody::AgentReady { mcp, .. } => {
            let failed = mcp.iter().filter(|server| server.state == McpState::Failed);
            failed.map(|server| format!("warning: MCP server {} failed", server.name)).collect()
        }
        EventBody::Compacted {} => vec!["Compacted the conversation".into()],
        EventBody::AgentExited { exit, tail, restarts } => {
            let next = if *restarts { "restarting it" } else { "it is not restarted" };
            with_tail(format!("The agent {}; {next}", describe_agent_exit(*exit)), tail)
        }
        EventBody::Restored { detail, .. } => vec![format!("Restored: {detail}")],
        EventBody::EgressRefused { name, reason, hint } => {
            refused_connection(name, reason, hint.as_deref())
        }
        EventBody::Pushed { repository, branch, commit } => {
            vec![format!("Pushed {branch} at {} to {repository}", short_commit(commit))]
        }
        EventBody::PushRefused { repository, reason } => {
            vec![format!("Refused a push to {repository}: {reason}")]
        }
        EventBody::PrSkipped { repository, reason, hint } => {
            let hint = hint.iter().map(|hint| format!("  hint: {hint}"));
            let first = format!("Pull request of {repository}: {reason}");
            std::iter::once(first).chain(hint).collect()
        }
        EventBody::Artifact { name, bytes, .. } => {
            vec![format!("Handed over {name} ({})", crate::cli::units::bytes(*bytes))]
        }
        EventBody::Warning { message } => vec![format!("warning: {message}")],
        EventBody::Blocked { criterion, error, attempts, checkpoint, needed_action } => {
            let mut lines = vec![format!("Blocked: {criterion}"), format!("  because: {error}")];
            lines.extend(attempts.iter().map(|attempt| format!("  tried:   {attempt}")));
            lines.extend(checkpoint.iter().map(|kept| format!("  kept as: {kept}")));
            lines.push(format!("  needed:  {needed_action}"));
            lines
        }
        _ => vec![],
    }
}

/// A connection that the network policy refused, and how to allow it.
pub(crate) fn refused_connection(name: &str, reason: &str, hint: Option<&str>) -> Vec<String> {
    let refused = format!("Refused a connection to {name}: {reason}");
    std::iter::once(refused).chain(hint.map(|hint| format!("  {hint}"))).collect()
}

/// Lines that only `--verbose` shows.
fn verbose_lines(body: &EventBody, width: usize) -> Vec<String> {
    match body {
        EventBody::StateChanged { state, reason, .. } => {
            vec![format!("State {}: {reason}", state.as_str())]
        }
        EventBody::SnapshotTaken { snapshot_id: snapshot, kind, millis } => vec![format!(
            "Saved snapshot {snapshot} of the {} ({})",
            describe_snapshot_kind(*kind),
            human_millis(*millis)
        )],
        EventBody::ThoughtDelta { text } => {
            text.lines().map(|line| format!("  ~ {line}")).collect()
        }
        EventBody::ModelCall { upstream, model, status, usage, millis } => vec![format!(
            "Called {model} ({upstream}, {status}) in {}: {} in, {} out",
            human_millis(*millis),
            usage.input_tokens + usage.cache_read_tokens + usage.cache_write_tokens,
            usage.output_tokens
        )],
        EventBody::BootPhase { phase, status, .. } => {
            vec![format!("{phase:?}: {status:?}").to_lowercase()]
        }
        EventBody::Synced { checkouts, .. } => checkouts.iter().filter_map(unmoved).collect(),
        EventBody::RepositoryConfig { repository, .. } => {
            vec![format!("Follows .harvest/config.toml of {repository}")]
        }
        EventBody::AgentReady { version, model, mcp } => {
            let said = [version.as_deref(), model.as_deref()].into_iter().flatten();
            let servers = mcp.iter().map(|server| server.name.as_str());
            vec![format!("Agent ready: {}", said.chain(servers).collect::<Vec<_>>().join(", "))]
        }
        EventBody::Title { title } => vec![format!("Title: {}", first_line(title))],
        EventBody::AgentRaw { line } => {
            vec![format!("  | {}", truncate(line, width.saturating_sub(5)))]
        }
        _ => vec![],
    }
}

/// How far the plan is, and the step that is being done.
fn plan(steps: &[PlanStep], width: usize) -> Vec<String> {
    let done = steps.iter().filter(|step| step.status == StepStatus::Completed).count();
    let current = steps.iter().find(|step| step.status != StepStatus::Completed);
    let current = current.map_or_else(String::new, |step| format!(": {}", first_line(&step.text)));
    let line = format!("Plan, {done} of {} done{current}", steps.len());
    vec![truncate(&line, width.saturating_sub(1))]
}

fn state_changed(state: SessionState, reason: StateReason, detail: Option<&str>) -> Vec<String> {
    // An earlier event has shown the rest of a long detail.
    let why = first_line(detail.unwrap_or(reason.as_str()));
    match state {
        SessionState::Failed => vec![format!("Failed: {why}")],
        SessionState::Paused if reason == StateReason::Paused => vec!["Paused".into()],
        SessionState::Paused => vec![format!("Paused: {why}")],
        SessionState::Archived => vec!["Archived".into()],
        // Every new session starts with this state.
        SessionState::Queued if reason != StateReason::Created => {
            vec![format!("Waiting for a free slot ({why})")]
        }
        _ => vec![],
    }
}

fn boot_phase(phase: BootPhase, millis: Option<u64>) -> Vec<String> {
    let done = match phase {
        // These take no noticeable time.
        BootPhase::Starting | BootPhase::Ready => return vec![],
        BootPhase::Sync => "Synced the checkout",
        BootPhase::Install => "Prepared dependencies",
        BootPhase::Setup => "Ran the repository's setup",
        BootPhase::Start => "Ran .harvest/start.sh",
        BootPhase::Agent => "Started the agent",
    };
    vec![format!("{done} in {}", human_millis(millis.unwrap_or(0)))]
}

/// A checkout that a sync cloned or left where it was.
fn unmoved(checkout: &SyncedCheckout) -> Option<String> {
    let SyncedCheckout { repository, before, after, .. } = checkout;
    let after = after.as_deref()?;
    let is_at = || format!("Synced {repository}: at {}", short_commit(after));
    before.as_deref().is_none_or(|before| before == after).then(is_at)
}

/// A checkout that a sync moved to a newer commit.
fn moved(checkout: &SyncedCheckout) -> Option<String> {
    let SyncedCheckout { repository, before, after, .. } = checkout;
    let (before, after) = (before.as_deref()?, after.as_deref()?);
    let commits = format!("{} → {}", short_commit(before), short_commit(after));
    (before != after).then(|| format!("Updated {repository}: {commits}"))
}

/// A command that installed dependencies; its output is only of interest when it failed.
pub(crate) fn install_step(
    (folder, command): (&str, &str),
    millis: u64,
    failure: Option<&str>,
    tail: &str,
) -> Vec<String> {
    let time = human_millis(millis);
    match failure {
        None => vec![format!("  ✓ {command} in {folder} ({time})")],
        Some(failure) => with_tail(format!("  ✗ {command} in {folder} {failure} ({time})"), tail),
    }
}

fn turn_ended(
    turn: Option<u32>,
    outcome: TurnOutcome,
    error: Option<&str>,
    millis: u64,
) -> Vec<String> {
    let turn = turn.map_or_else(|| "the turn".to_owned(), |number| format!("turn {number}"));
    let what = match outcome {
        TurnOutcome::Completed => "Completed",
        TurnOutcome::Failed => "Failed",
        TurnOutcome::Stopped => "Stopped",
        TurnOutcome::Interrupted => "Interrupted",
    };
    let error = error.map_or_else(String::new, |error| format!(": {error}"));
    vec![format!("{what} {turn} in {}{error}", human_millis(millis))]
}

/// `of` is the repository's suffix.
fn check_result(evidence: &Evidence, of: &str) -> Vec<String> {
    let (commit, time) =
        (format!("{}{of}", short_commit(&evidence.commit)), human_millis(evidence.millis));
    let check = &evidence.check;
    let mut lines = match evidence.outcome {
        CheckOutcome::Passed => {
            vec![format!("Check passed on {commit} in a fresh sandbox: {check} ({time})")]
        }
        CheckOutcome::NoneDeclared => vec![format!("Not checked{of}: {}", evidence.tail)],
        CheckOutcome::Failed => {
            let exit = describe_exit(evidence.exit);
            let line =
                format!("Check failed on {commit} in a fresh sandbox: {check} ({exit}, {time})");
            with_tail(line, &evidence.tail)
        }
    };
    if evidence.changed_count > 0 {
        let names = evidence.changed.join(", ");
        lines
            .push(format!("  the commit changes {} of .harvest/: {names}", evidence.changed_count));
    }
    lines
}

fn question_lines(question: &str, options: &[String]) -> Vec<String> {
    let options = (1..).zip(options).map(|(number, option)| format!("  {number}. {option}"));
    std::iter::once(format!("? {question}")).chain(options).collect()
}

#[cfg(test)]
mod tests;
