//! Follows a session on the screen: what `run`, `attach`, `send -f` and `logs` share.

use std::{io::Write, pin::pin};

use anyhow::{Result, bail};
use futures_util::StreamExt;
use harvest_proto::{Event, EventBody, SessionId, api::Session};

use crate::{
    Invocation,
    client::Client,
    follow::{Update, Verdict, Watch},
    printer::columns,
    render::{Piece, Renderer},
};

/// When to stop following by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Until {
    /// The session rests and its queue is empty.
    Rest,
    /// Never; a person detaches.
    Detached,
}

/// How following ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Seen {
    Rest(Verdict),
    Detached,
}

/// Prints a session's events after `after` as they come. Ctrl-C ends the looking, not the session.
pub(crate) async fn follow(
    here: &Invocation,
    client: &Client,
    session: &SessionId,
    after: u64,
    until: Until,
) -> Result<Seen> {
    let mut updates = pin!(client.follow(session, after));
    let mut detach = pin!(tokio::signal::ctrl_c());
    let mut screen = Screen::new(here, false);
    let mut watch = Watch::default();
    loop {
        let update = tokio::select! {
            update = updates.next() => update,
            _ = &mut detach => {
                screen.finish()?;
                here.print.note(format!("Detached from {session}; it goes on"));
                here.print.hint(format!("`harvest attach {session}` comes back, `harvest stop {session}` stops it"));
                return Ok(Seen::Detached);
            }
        };
        match update {
            Some(Ok(Update::Event(event))) => {
                screen.event(&event)?;
                let verdict = watch.event(&event.body);
                if let (Some(verdict), Until::Rest) = (verdict, until) {
                    screen.finish()?;
                    return Ok(Seen::Rest(verdict));
                }
            }
            Some(Ok(Update::Snapshot(session))) => screen.session(&session),
            Some(Err(error)) => {
                screen.finish()?;
                return Err(error);
            }
            None => bail!("the stream of {session} ended"),
        }
    }
}

/// Waits, printing nothing, until an event after `after` is what is waited for.
pub(crate) async fn until<T>(
    client: &Client,
    session: &SessionId,
    after: u64,
    mut seen: impl FnMut(&EventBody) -> Option<T>,
) -> Result<T> {
    let mut updates = pin!(client.follow(session, after));
    while let Some(update) = updates.next().await {
        let Update::Event(event) = update? else { continue };
        if let Some(seen) = seen(&event.body) {
            return Ok(seen);
        }
    }
    bail!("the stream of {session} ended")
}

/// Prints events: as JSON lines, or rendered.
pub(crate) struct Screen<'a> {
    here: &'a Invocation,
    renderer: Renderer,
    /// Whether lines are results (`logs`), not only asides.
    lines_are_results: bool,
}

impl<'a> Screen<'a> {
    pub(crate) fn new(here: &'a Invocation, lines_are_results: bool) -> Self {
        let renderer = Renderer::new(here.print.verbose, columns());
        Self { here, renderer, lines_are_results }
    }

    /// What is known of the session itself, before its events.
    pub(crate) fn session(&mut self, session: &Session) {
        self.renderer.session(session);
    }

    /// Shows what tools said to its end.
    pub(crate) fn full(&mut self) {
        self.renderer.full();
    }

    pub(crate) fn event(&mut self, event: &Event) -> Result<()> {
        if self.here.print.json {
            return self.here.print.item(event);
        }
        for piece in self.renderer.event(event) {
            self.piece(piece)?;
        }
        Ok(())
    }

    pub(crate) fn finish(&mut self) -> Result<()> {
        match self.renderer.finish() {
            Some(piece) if !self.here.print.json => self.piece(piece),
            _ => Ok(()),
        }
    }

    fn piece(&self, piece: Piece) -> Result<()> {
        match piece {
            Piece::Text(text) => self.here.print.out(&text),
            Piece::Line(line) if self.lines_are_results => self.here.print.out(&(line + "\n")),
            Piece::Line(line) => {
                // Both streams may be one screen: what was said first has to be on it first.
                std::io::stdout().flush()?;
                self.here.print.note(line);
                Ok(())
            }
        }
    }
}

/// The exit code of a followed session, and what a person may do next.
pub(crate) fn exit_code(here: &Invocation, session: &SessionId, seen: Seen) -> u8 {
    match seen {
        Seen::Rest(Verdict::Good) | Seen::Detached => 0,
        Seen::Rest(Verdict::Asked) => {
            here.print.hint(format!("answer with `harvest send {session} \"…\"`"));
            0
        }
        Seen::Rest(Verdict::Bad) => {
            here.print.hint(format!(
                "`harvest logs {session}` has all of it; `harvest send {session} \"…\"` goes on"
            ));
            super::FAILED
        }
    }
}
