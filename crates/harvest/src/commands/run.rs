//! `harvest run`: creates a session and follows it until it rests.

use std::path::Path;

use anyhow::{Context, Result};
use harvest_proto::api::{AddRepository, CreateSession, UseRepository};

use super::watch::{self, Until};
use crate::{
    Invocation,
    cli::Run,
    client::Client,
    printer::{Advice, Refused},
};

pub(crate) async fn run(here: &Invocation, args: Run) -> Result<u8> {
    let client = Client::find(&here.config)?;
    let mut repositories = Vec::with_capacity(args.repositories.len());
    for named in &args.repositories {
        repositories.push(registered(here, &client, named).await?);
    }
    if let (Some(first), Some(base)) = (repositories.first_mut(), args.base) {
        first.base = Some(base);
    }
    let request = CreateSession {
        repositories,
        prompt: Some(args.prompt),
        agent: args.agent,
        model: args.model,
        network: args.net,
        ..CreateSession::default()
    };
    let session = client
        .create(&request)
        .await
        .map_err(|error| unknown(error, &args.repositories))
        .context("cannot create a session")?;
    if args.detach {
        here.print.result(&session, |session| format!("{}\n", session.id))?;
        here.print.hint(format!("`harvest attach {}` follows it", session.id));
        return Ok(0);
    }
    if here.print.json {
        here.print.item(&session)?;
    }
    here.print.note(format!("Created {} on {} (ctrl-c detaches; it goes on)", session.id, session.branch));
    let seen = watch::follow(here, &client, &session.id, 0, Until::Rest).await?;
    Ok(watch::exit_code(here, &session.id, seen))
}

/// An unknown repository is what a first `run` stumbles over.
fn unknown(error: anyhow::Error, named: &[String]) -> anyhow::Error {
    match error.downcast_ref::<Refused>() {
        Some(refused) if refused.0.status == 404 => {
            let hint = match named.iter().find(|named| Path::new(named).is_dir()) {
                Some(named) => format!("`harvest repo add {named}` registers a folder under a name"),
                None => "`harvest repo ls` lists them; a git URL in place of the name registers it".into(),
            };
            Advice::new(refused.0.detail.clone(), hint).into()
        }
        _ => error,
    }
}

/// A repository by its name; a URL nobody registered is registered now.
async fn registered(here: &Invocation, client: &Client, named: &str) -> Result<UseRepository> {
    let by_name = |name: &str| UseRepository { name: Some(name.to_owned()), ..UseRepository::default() };
    if !named.contains("://") {
        return Ok(by_name(named));
    }
    let known = client.repositories().await?;
    if let Some(repository) = known.iter().find(|repository| same_url(&repository.url, named)) {
        return Ok(by_name(&repository.name));
    }
    let request = AddRepository { url: named.to_owned(), ..AddRepository::default() };
    let added =
        client.repository_add(&request).await.map_err(|error| match error.downcast_ref::<Refused>() {
            Some(refused) if refused.0.status == 409 => error.context(Advice::new(
                "another repository has that name",
                "register it with `harvest repo add --name`",
            )),
            _ => error,
        })?;
    here.print.note(format!("Registered {} as {}", added.url, added.name));
    Ok(by_name(&added.name))
}

fn same_url(left: &str, right: &str) -> bool {
    let plain = |url: &str| url.trim_end_matches('/').trim_end_matches(".git").to_owned();
    plain(left) == plain(right)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_is_the_same_with_and_without_its_ending() {
        assert!(same_url("http://h/a.git", "http://h/a/"));
        assert!(!same_url("http://h/a", "http://h/b"));
    }
}
