//! `harvest logs`: what happened in a session, to its end, or as it goes on.

use std::pin::pin;

use anyhow::Result;
use futures_util::StreamExt;
use harvest_proto::{Event, SessionId};

use super::watch::Screen;
use crate::{Invocation, cli::Logs, client::Client, follow::Update, resolve, whole};

pub(crate) async fn run(here: &Invocation, args: &Logs) -> Result<u8> {
    let client = Client::find(&here.config)?;
    let session = resolve::session(&client, &args.session).await?;
    let mut screen = Screen::new(here, true);
    if args.full {
        screen.full();
    }
    let mut output = Output { args, client: &client, session: &session, screen };
    if args.follow {
        output.follow().await?;
    } else {
        output.all().await?;
    }
    output.screen.finish()?;
    Ok(0)
}

struct Output<'a> {
    args: &'a Logs,
    client: &'a Client,
    session: &'a SessionId,
    screen: Screen<'a>,
}

impl Output<'_> {
    async fn all(&mut self) -> Result<()> {
        self.screen.session(&self.client.session(self.session).await?);
        let mut after = self.args.after;
        loop {
            let page = self.client.events(self.session, after).await?;
            for event in page.items {
                after = event.seq;
                self.event(event).await?;
            }
            if page.next_cursor.is_none() {
                return Ok(());
            }
        }
    }

    async fn follow(&mut self) -> Result<()> {
        let mut updates = pin!(self.client.follow(self.session, self.args.after));
        let mut detach = pin!(tokio::signal::ctrl_c());
        loop {
            let update = tokio::select! {
                _ = &mut detach => return Ok(()),
                update = updates.next() => update,
            };
            match update {
                Some(Ok(Update::Event(event))) => self.event(*event).await?,
                Some(Ok(Update::Snapshot(session))) => self.screen.session(&session),
                Some(Err(error)) => return Err(error),
                None => return Ok(()),
            }
        }
    }

    async fn event(&mut self, mut event: Event) -> Result<()> {
        if self.args.full {
            whole::fetch(self.client, self.session, &mut event.body).await?;
        }
        self.screen.event(&event)
    }
}
