//! `harvest repo`: registers repositories and builds the state sessions start from.

use std::path::Path;

use anyhow::{Context, Result, bail};
use harvest_proto::api::{AddRepository, Build, BuildLine, Repository};
use serde_json::json;

use crate::{
    Invocation,
    cli::Repo,
    client::Client,
    printer::{Advice, table, took},
    publish::{Naming, forge, publish},
    render::short,
};

pub(crate) async fn run(here: &Invocation, verb: Repo) -> Result<u8> {
    let client = Client::find(&here.config)?;
    match verb {
        Repo::Add { location, name, base, secret, image } => {
            let request = AddRepository { url: location, name, base, secret, image };
            let (added, new) = add(here, &client, request).await?;
            here.print.result(&added, |added| format!("{}\n", added.name))?;
            match new {
                true => here.print.note(format!("Registered {} as {}", added.url, added.name)),
                false => {
                    here.print.note(format!("Brought {} up to date with its folder", added.name))
                }
            }
            here.print
                .hint(format!("`harvest repo build {}` makes sessions start faster", added.name));
        }
        Repo::Build { name } => {
            tokio::select! {
                built = build(here, &client, &name) => drop(built?),
                _ = tokio::signal::ctrl_c() => {
                    here.print.note(format!("\nDetached; the server goes on building {name}"));
                    here.print.hint("`harvest repo ls` shows when it is built");
                }
            }
        }
        Repo::Ls => {
            let repositories = client.repositories().await?;
            if repositories.is_empty() && !here.print.json {
                here.print.note("no repositories yet");
                here.print.hint("register one with `harvest repo add URL|FOLDER`");
                return Ok(0);
            }
            here.print.result(&repositories, |repositories| {
                let rows: Vec<_> = repositories.iter().map(row).collect();
                table(&["NAME", "BUILT", "COMMIT", "CHECK", "IMAGE", "URL"], &rows)
            })?;
        }
        Repo::Rm { name } => {
            let known = client.repositories().await?.into_iter().find(|known| known.name == name);
            client.repository_delete(&name).await?;
            here.print.result(&json!({ "forgotten": name }), |_| String::new())?;
            let copied = known
                .is_some_and(|known| known.url.starts_with(&format!("{}/forge/", client.url())));
            here.print.note(match copied {
                true => format!(
                    "Forgot {name}, and removed its copy on the local forge; the folder stays as it is"
                ),
                false => format!("Forgot {name}"),
            });
        }
    }
    Ok(0)
}

/// A URL is registered as it is; a folder goes to the forge of the server on this machine first.
async fn add(
    here: &Invocation,
    client: &Client,
    request: AddRepository,
) -> Result<(Repository, bool)> {
    let folder = Path::new(&request.url);
    if !request.url.contains("://") && !folder.is_dir() {
        let hint = "name a folder, or an http or https URL";
        bail!(Advice::new(format!("there is no folder `{}`", request.url), hint));
    }
    if request.url.contains("://") {
        let added =
            client.repository_add(&request).await.context("cannot register the repository")?;
        return Ok((added, true));
    }
    let folder = folder.to_owned();
    let published =
        publish(here.print, client, &forge(here)?, (&folder, Naming::Strict), request).await?;
    Ok((published.repository, published.new))
}

/// Builds a repository and prints how it goes.
pub(crate) async fn build(here: &Invocation, client: &Client, name: &str) -> Result<Build> {
    let mut lines =
        client.repository_build(name).await.with_context(|| format!("cannot build {name}"))?;
    while let Some(line) = lines.json::<BuildLine>().await? {
        if here.print.json {
            here.print.item(&line)?;
        }
        match line {
            BuildLine::Progress { message } => {
                here.print.note(format!("  {}", phase_words(&message)))
            }
            BuildLine::Built { build } => {
                here.print.note(format!(
                    "Built {name} at {} in {}",
                    short(&build.commit),
                    took(build.millis)
                ));
                return Ok(build);
            }
            BuildLine::Failed { message, .. } => bail!("{name} was not built: {message}"),
        }
    }
    bail!("the server went away before the build ended")
}

/// The phases of a boot are words for programs.
fn phase_words(message: &str) -> &str {
    match message {
        "starting" => "starting the supervisor",
        "sync" => "fetching the code",
        "setup" => "running .harvest/setup.sh, if there is one",
        "start" => "running .harvest/start.sh, if there is one",
        "agent" => "starting the agent once",
        other => other,
    }
}

fn row(repository: &Repository) -> Vec<String> {
    let none = || "–".to_owned();
    let build = repository.build.as_ref();
    let check = build.and_then(|build| build.check.as_ref());
    vec![
        repository.name.clone(),
        build.map_or_else(none, |build| build.built_at.to_string()),
        build.map_or_else(none, |build| short(&build.commit).to_owned()),
        check.map_or_else(none, |check| if check.passed { "passed" } else { "failed" }.to_owned()),
        repository.image.clone(),
        repository.url.clone(),
    ]
}
