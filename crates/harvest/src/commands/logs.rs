//! `harvest logs`: what happened in a session, to its end, or as it goes on.

use std::pin::pin;

use anyhow::Result;
use futures_util::StreamExt;

use super::watch::Screen;
use crate::{Invocation, cli::Logs, client::Client, follow::Update, resolve};

pub(crate) async fn run(here: &Invocation, args: &Logs) -> Result<u8> {
    let client = Client::find(&here.config)?;
    let id = resolve::session(&client, &args.session).await?;
    let mut screen = Screen::new(here, true);
    let mut after = args.after;
    if args.follow {
        let mut updates = pin!(client.follow(&id, after));
        let mut detach = pin!(tokio::signal::ctrl_c());
        loop {
            tokio::select! {
                _ = &mut detach => break,
                update = updates.next() => match update {
                    Some(Ok(Update::Event(event))) => screen.event(&event)?,
                    Some(Ok(Update::Snapshot(_))) => {}
                    Some(Err(error)) => return Err(error),
                    None => break,
                },
            }
        }
    } else {
        loop {
            let page = client.events(&id, after).await?;
            for event in &page.items {
                screen.event(event)?;
                after = event.seq;
            }
            if page.next_cursor.is_none() {
                break;
            }
        }
    }
    screen.finish()?;
    Ok(0)
}
