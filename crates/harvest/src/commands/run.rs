//! `harvest run`: creates a session and follows it until it rests.

use anyhow::{Context, Result};
use harvest_proto::api::CreateSession;

use super::{
    exec::variables,
    watch::{self, Until},
};
use crate::{Invocation, cli::Run, client::Client, desk::Desk, inputs, resolve};

pub(crate) async fn run(here: &Invocation, args: Run) -> Result<u8> {
    let client = Client::find(&here.config)?;
    let env = variables(&args.env)?;
    let from = match args.from {
        Some(typed) => Some(resolve::snapshot(&Desk::of(client.clone()), &typed).await?),
        None => None,
    };
    let mut repositories = inputs::repositories(here, &client, &args.repositories).await?;
    if let (Some(first), Some(base)) = (repositories.first_mut(), args.base) {
        first.base = Some(base);
    }
    let request = CreateSession {
        repositories,
        prompt: Some(args.prompt),
        agent: args.agent,
        model: args.model,
        network: args.net,
        env,
        from,
        key: args.key,
        ..CreateSession::default()
    };
    let session = client.create(&request).await.context("cannot create a session")?;
    if args.detach {
        here.print.result(&session, |session| format!("{}\n", session.id))?;
        here.print.hint(format!("`harvest attach {}` follows it", session.id));
        return Ok(0);
    }
    if here.print.json {
        here.print.item(&session)?;
    }
    here.print.note(format!(
        "Created {} on {} (ctrl-c detaches; it goes on)",
        session.id, session.branch
    ));
    let seen = watch::follow(here, &client, &session.id, 0, Until::Rest).await?;
    Ok(watch::exit_code(here, &session.id, seen))
}
