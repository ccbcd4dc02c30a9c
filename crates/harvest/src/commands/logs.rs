//! `harvest logs`: what happened in a session, to its end, or as it goes on.

use anyhow::Result;
use futures_util::StreamExt;

use super::watch::Screen;
use crate::{Invocation, cli::Logs, client::Client, follow::Update, resolve, whole};

pub(crate) async fn run(here: &Invocation, args: &Logs) -> Result<u8> {
    let client = Client::find(&here.config)?;
    let session = resolve::session(&client, &args.session).await?;
    let mut screen = Screen::new(here, true);
    if args.full {
        screen.full();
    }
    screen.session(&client.session(&session).await?);
    let mut updates = client.told(&session, args.after, args.follow);
    while let Some(update) = updates.next().await {
        let Update::Event(mut event) = update? else { continue };
        if args.full {
            whole::fetch(&client, &session, &mut event.body).await?;
        }
        screen.event(&event)?;
    }
    screen.finish()?;
    Ok(0)
}
