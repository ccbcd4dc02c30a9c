//! Follows a session on the terminal, for `run`, `attach`, `send -f` and `logs`.

use std::{io::Write, pin::pin, time::SystemTime};

use anyhow::{Result, bail};
use futures_util::StreamExt;
use harvest_proto::{Event, EventBody, SessionId, Timestamp};

use crate::{
    Invocation,
    client::Client,
    follow::{CompletionTracker, Update, Verdict},
    printer::columns,
    render::{Activity, Piece, Renderer},
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StopWhen {
    /// The session is done: idle or paused with an empty queue.
    Idle,
    /// Only Ctrl-C ends it.
    Never,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FollowResult {
    Finished(Verdict),
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
    let mut updates = pin!(client.follow(session, after));
    let mut detach = pin!(tokio::signal::ctrl_c());
    let mut screen = Screen::new(ctx, false);
    let mut tracker = CompletionTracker::default();
    loop {
        let update = tokio::select! {
            update = updates.next() => update,
            _ = &mut detach => {
                screen.finish()?;
                ctx.print.note(format!("Detached from {session}; it keeps running"));
                ctx.print.hint(format!("`harvest attach {session}` follows it again, `harvest stop {session}` stops it"));
                return Ok(FollowResult::Detached);
            }
        };
        match update {
            Some(Ok(Update::Event(event))) => {
                screen.event(&event)?;
                let verdict = tracker.event(&event.body);
                if let (Some(verdict), StopWhen::Idle) = (verdict, stop_when) {
                    screen.finish()?;
                    return Ok(FollowResult::Finished(verdict));
                }
            }
            Some(Ok(Update::Snapshot(session))) => screen.renderer.session(&session),
            Some(Err(error)) => {
                screen.finish()?;
                return Err(error);
            }
            None => bail!("the event stream of {session} ended"),
        }
    }
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
        Self { ctx, renderer, lines_are_results, follows: true, shown: None }
    }

    pub(crate) fn event(&mut self, event: &Event) -> Result<()> {
        if self.ctx.print.json {
            return self.ctx.print.item(event);
        }
        let pieces = self.renderer.event(event);
        if !pieces.is_empty() {
            self.shown = None;
            self.ctx.print.end_live();
        }
        for piece in pieces {
            self.piece(piece)?;
        }
        self.show_activity();
        Ok(())
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

    fn piece(&self, piece: Piece) -> Result<()> {
        match piece {
            Piece::Text(text) => self.ctx.print.styled_out(&text),
            Piece::Line(line) if self.lines_are_results => {
                self.ctx.print.styled_out(&(line + "\n"))
            }
            Piece::Line(line) => {
                // stdout and stderr may be the same terminal: keep the order.
                std::io::stdout().flush()?;
                self.ctx.print.styled_note(&line);
                Ok(())
            }
        }
    }
}

/// The exit code of a followed session; prints a hint for the next step.
pub(crate) fn exit_code(ctx: &Invocation, session: &SessionId, result: FollowResult) -> u8 {
    match result {
        FollowResult::Finished(Verdict::Succeeded) | FollowResult::Detached => 0,
        FollowResult::Finished(Verdict::NeedsInput) => {
            ctx.print.hint(format!("answer with `harvest send {session} \"…\"`"));
            0
        }
        FollowResult::Finished(Verdict::Failed) => {
            ctx.print.hint(format!(
                "`harvest logs {session}` prints the history; `harvest send {session} \"…\"` continues"
            ));
            super::FAILED
        }
    }
}
