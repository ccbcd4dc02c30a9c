//! `harvest logs`: prints a session's history, with `-f` also new events.

use anyhow::Result;
use futures_util::StreamExt;

use super::watch::Screen;
use crate::{Invocation, blob_fetch, cli::LogsArgs, follow::Update};

pub(crate) async fn run(ctx: &Invocation, args: &LogsArgs) -> Result<u8> {
    let (client, session) = ctx.session(&args.session).await?;
    let mut screen = Screen::new(ctx, true);
    screen.follows = args.follow;
    screen.times = args.times;
    screen.renderer.full = args.full;
    screen.renderer.session(&client.session(&session).await?);
    let mut updates = client.events_after(&session, args.after, args.follow);
    while let Some(update) = updates.next().await {
        let Update::Event(mut event) = update? else { continue };
        if args.full {
            blob_fetch::fetch(&client, &session, &mut event.body).await?;
        }
        screen.event(&event)?;
    }
    screen.finish()?;
    Ok(0)
}
