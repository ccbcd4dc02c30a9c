//! `harvest repo`: registers repositories and builds the state sessions start from.

use std::path::Path;

use anyhow::{Context, Result, bail};
use harvest_github::Forge;
use harvest_proto::api::{AddRepository, Build, BuildLine, Repository};

use crate::{
    Invocation,
    cli::Repo,
    client::{self, Client},
    printer::{table, took},
    publish::publish,
    render::short,
};

pub(crate) async fn run(here: &Invocation, verb: Repo) -> Result<u8> {
    let client = Client::find(&here.config)?;
    match verb {
        Repo::Add { location, name, base, secret, image } => {
            let request = AddRepository { url: location, name, base, secret, image };
            let added = add(here, &client, request).await?;
            here.print.result(&added, |added| format!("{}\n", added.name))?;
            here.print.note(format!("Registered {} as {}", added.url, added.name));
            here.print.hint(format!("`harvest repo build {}` makes sessions start faster", added.name));
        }
        Repo::Build { name } => {
            build(here, &client, &name).await?;
        }
        Repo::Ls => {
            let repositories = client.repositories().await?;
            here.print.result(&repositories, |repositories| {
                let rows: Vec<_> = repositories.iter().map(row).collect();
                table(&["NAME", "BUILT", "COMMIT", "CHECK", "IMAGE", "URL"], &rows)
            })?;
        }
        Repo::Rm { name } => {
            client.repository_delete(&name).await?;
            here.print.note(format!("Forgot {name}"));
        }
    }
    Ok(0)
}

/// A URL is registered as it is; a folder goes to the forge of the server on this machine first.
async fn add(here: &Invocation, client: &Client, request: AddRepository) -> Result<Repository> {
    let folder = Path::new(&request.url);
    if request.url.contains("://") || !folder.is_dir() {
        return client.repository_add(&request).await.context("cannot register the repository");
    }
    let server =
        client::local(&here.config).context("a folder can only be added on the server's own machine")?;
    let forge = Forge::open(here.config.home.join("forge"), &format!("{}/forge", server.url))?;
    let folder = folder.to_owned();
    publish(client, &forge, &folder, request).await
}

/// Builds a repository and prints how it goes.
pub(crate) async fn build(here: &Invocation, client: &Client, name: &str) -> Result<Build> {
    let mut lines = client.repository_build(name).await.with_context(|| format!("cannot build {name}"))?;
    while let Some(line) = lines.json::<BuildLine>().await? {
        if here.print.json {
            here.print.item(&line)?;
        }
        match line {
            BuildLine::Progress { message } => here.print.note(format!("  {message}")),
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
