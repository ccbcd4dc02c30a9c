//! Follows a session on the terminal, for `run`, `attach`, `send -f` and `logs`.

use std::{io::Write, pin::pin, time::SystemTime};

use anyhow::{Context, Result, bail};
use futures_util::StreamExt;
use harvest_proto::{Event, EventBody, SessionId, Timestamp, api::CreatePrompt, budget_command};

use super::answers::Answers;
use crate::{
    Invocation,
    client::Client,
    follow::{CompletionTracker, Update, Verdict},
    printer::columns,
    render::{Activity, Piece, Renderer},
};

/// Events before the first one shown that are read for what they began: the turn, running tools and
/// open questions. As many as a page can have.
const EARLIER_EVENTS: u64 = 1000;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StopWhen {
    /// The session is done: idle or paused with an empty queue.
    Idle,
    /// Only Ctrl-C ends it, or a question that cannot be answered here.
    Never,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum FollowResult {
    Finished(Verdict),
    /// A budget stopped the session; its error says which.
    OverBudget(String),
    Detached,
}

/// Prints a session's events after `after` as they arrive. Ctrl-C detaches; the session keeps
/// running.
pub(crate) async fn follow(
    ctx: &Invocation,
    client: &Client,
    session: &SessionId,
    after: u64,
    stop_when: StopWhen,
) -> Result<FollowResult> {
    let (mut screen, mut tracker) = join(ctx, client, session, after).await?;
    let mut answers = Answers::new(ctx.print);
    let mut updates = pin!(client.follow(session, after));
    let mut detach = pin!(tokio::signal::ctrl_c());
    // Earlier events may tell of questions that are answered by now.
    let mut newest = 0;
    loop {
        let update = tokio::select! {
            update = updates.next() => update,
            answer = answers.next() => {
                let Some(text) = answer else {
                    answers.withdraw();
                    return finish(screen, Verdict::NeedsInput);
                };
                let request = CreatePrompt::new(text);
                client.prompt(session, &request).await.context("cannot answer")?;
                continue;
            }
            _ = &mut detach => {
                answers.withdraw();
                screen.finish()?;
                return Ok(detached(ctx, session));
            }
        };
        match update {
            Some(Ok(Update::Event(event))) => {
                let verdict = tracker.event(&event.body);
                let question = tracker.question().filter(|_| event.seq >= newest);
                if question.is_none() {
                    answers.withdraw();
                }
                screen.asks = answers.waits();
                if screen.event(&event)? && screen.asks {
                    answers.repeat();
                }
                match verdict {
                    Some(Verdict::NeedsInput) if event.seq < newest => {}
                    Some(Verdict::NeedsInput) => match question {
                        Some(question) if ctx.print.can_ask() => answers.ask(question),
                        _ => {
                            let Some(error) = tracker.over_budget() else {
                                return finish(screen, Verdict::NeedsInput);
                            };
                            screen.finish()?;
                            return Ok(FollowResult::OverBudget(error.to_owned()));
                        }
                    },
                    Some(verdict) if stop_when == StopWhen::Idle => return finish(screen, verdict),
                    _ => {}
                }
            }
            Some(Ok(Update::Snapshot(session))) => {
                newest = session.seq;
                screen.renderer.session(&session);
            }
            Some(Err(error)) => {
                screen.finish()?;
                return Err(error);
            }
            None => bail!("the event stream of {session} ended"),
        }
    }
}

/// Reads what began before the first event that is shown.
async fn join<'a>(
    ctx: &'a Invocation,
    client: &Client,
    session: &SessionId,
    after: u64,
) -> Result<(Screen<'a>, CompletionTracker)> {
    let mut screen = Screen::new(ctx, false);
    let mut tracker = CompletionTracker::default();
    for event in client.events_up_to(session, after, EARLIER_EVENTS).await? {
        screen.renderer.skip(&event);
        tracker.event(&event.body);
    }
    tracker.begin();
    Ok((screen, tracker))
}

fn detached(ctx: &Invocation, session: &SessionId) -> FollowResult {
    ctx.print.note(format!("Detached from {session}; it keeps running"));
    ctx.print.hint(format!(
        "`harvest attach {session}` follows it again, `harvest stop {session}` stops it"
    ));
    FollowResult::Detached
}

fn finish(mut screen: Screen, verdict: Verdict) -> Result<FollowResult> {
    screen.finish()?;
    Ok(FollowResult::Finished(verdict))
}

/// Waits silently until `matches` returns a value for an event after `after`.
pub(crate) async fn until<T>(
    client: &Client,
    session: &SessionId,
    after: u64,
    mut matches: impl FnMut(&EventBody) -> Option<T>,
) -> Result<T> {
    let mut updates = pin!(client.follow(session, after));
    while let Some(update) = updates.next().await {
        let Update::Event(event) = update? else { continue };
        if let Some(found) = matches(&event.body) {
            return Ok(found);
        }
    }
    bail!("the event stream of {session} ended")
}

/// Prints events as JSON lines or rendered text.
pub(crate) struct Screen<'a> {
    ctx: &'a Invocation,
    pub(super) renderer: Renderer,
    /// Whether lines go to stdout (`logs`) instead of stderr.
    lines_are_results: bool,
    /// Whether events arrive as they happen.
    pub(super) follows: bool,
    /// Whether lines begin with the time of their event.
    pub(super) times: bool,
    /// Whether the last line is a prompt, with what the user has typed.
    asks: bool,
    /// The time of the newest event.
    at: Timestamp,
    /// Whether the printed text ends in the middle of a line.
    mid_line: bool,
    /// The activity on the live line.
    shown: Option<Activity>,
}

impl<'a> Screen<'a> {
    pub(crate) fn new(ctx: &'a Invocation, lines_are_results: bool) -> Self {
        let style = if lines_are_results { ctx.print.stdout } else { ctx.print.stderr };
        let mut renderer = Renderer::new(ctx.print.verbose, columns(), style);
        if !ctx.print.stdout.is_plain() {
            renderer.render_markdown(ctx.print.stdout);
        }
        Self {
            ctx,
            renderer,
            lines_are_results,
            follows: true,
            times: false,
            asks: false,
            at: Timestamp::from_millis(0),
            mid_line: false,
            shown: None,
        }
    }

    /// Returns whether it printed anything but the live line.
    pub(crate) fn event(&mut self, event: &Event) -> Result<bool> {
        if self.ctx.print.json {
            self.ctx.print.item(event)?;
            return Ok(true);
        }
        let pieces = self.renderer.event(event);
        self.at = event.at;
        let prints = !pieces.is_empty();
        if prints {
            self.shown = None;
            self.ctx.print.end_live();
        }
        if prints && self.asks {
            self.ctx.print.note("");
        }
        for piece in pieces {
            self.piece(piece)?;
        }
        self.show_activity();
        Ok(prints)
    }

    /// Shows what the session is doing on the live line, unless the same is shown already.
    fn show_activity(&mut self) {
        let activity = self.renderer.activity().filter(|_| self.follows);
        if activity == self.shown {
            return;
        }
        match &activity {
            Some(Activity { what, since }) => {
                let now = Timestamp::from(SystemTime::now());
                self.ctx.print.live(what, since.map(|since| now.since(since)));
            }
            None => self.ctx.print.end_live(),
        }
        self.shown = activity;
    }

    pub(crate) fn finish(&mut self) -> Result<()> {
        self.ctx.print.end_live();
        match self.renderer.finish() {
            Some(piece) if !self.ctx.print.json => self.piece(piece),
            _ => Ok(()),
        }
    }

    fn piece(&mut self, piece: Piece) -> Result<()> {
        match piece {
            Piece::Text(text) => self.result(text),
            Piece::Line(line) if self.lines_are_results => self.result(line + "\n"),
            Piece::Line(line) => {
                // stdout and stderr may be the same terminal: keep the order.
                std::io::stdout().flush()?;
                self.ctx.print.styled_note(&line);
                Ok(())
            }
        }
    }

    fn result(&mut self, text: String) -> Result<()> {
        match self.times {
            true => self.ctx.print.styled_out(&stamped(&text, self.at, &mut self.mid_line)),
            false => self.ctx.print.styled_out(&text),
        }
    }
}

/// Puts a time before each line that begins in this text.
fn stamped(text: &str, at: Timestamp, mid_line: &mut bool) -> String {
    let line = |line: &str| {
        let continues = std::mem::replace(mid_line, !line.ends_with('\n'));
        if continues { line.to_owned() } else { format!("{at} {line}") }
    };
    text.split_inclusive('\n').map(line).collect()
}

/// The exit code of a followed session; prints a hint for the next step.
pub(crate) fn exit_code(ctx: &Invocation, session: &SessionId, result: FollowResult) -> u8 {
    match result {
        FollowResult::Finished(Verdict::Succeeded) | FollowResult::Detached => 0,
        FollowResult::Finished(Verdict::NeedsInput) => {
            ctx.print.hint(format!("answer with `harvest send {session} \"…\"`"));
            super::NEEDS_INPUT
        }
        FollowResult::OverBudget(error) => {
            ctx.print.hint(match budget_command(&error) {
                Some(command) => {
                    format!("`{command}` raises the budget; the session continues then")
                }
                None => {
                    format!("`harvest send {session} \"…\"` continues once the limit is raised")
                }
            });
            super::NEEDS_INPUT
        }
        FollowResult::Finished(Verdict::Failed) => {
            ctx.print.hint(format!(
                "`harvest logs {session}` prints the history; `harvest send {session} \"…\"` continues"
            ));
            super::FAILED
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_beginnings_of_lines_are_stamped() {
        let (mut mid_line, at) = (false, Timestamp::from_millis(0));
        let mut stamped = |text: &str| stamped(text, at, &mut mid_line);
        assert_eq!(stamped("I look"), "1970-01-01T00:00:00.000Z I look");
        assert_eq!(stamped(" at it.\nOne"), " at it.\n1970-01-01T00:00:00.000Z One");
        assert_eq!(stamped("\n"), "\n");
        assert_eq!(stamped("Done.\n"), "1970-01-01T00:00:00.000Z Done.\n");
    }
}
