//! `harvest repo`: registers, prebuilds, lists and removes repositories.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use harvest_proto::{
    RepositoryName,
    api::{AddRepository, Build, BuildLine, Repository},
    event::BootPhase,
};
use reqwest::Method;
use serde_json::json;

use super::ls::age;
use crate::{
    Invocation,
    cli::RepoCommand,
    client::Client,
    confirm,
    follow::Lines,
    printer::{Advice, ApiRefusal, human_elapsed, human_millis},
    publish::{NameConflict, Source, forge, publish},
    render::{phase_label, refused_connection, short_commit},
};

pub(crate) async fn run(ctx: &Invocation, verb: RepoCommand) -> Result<u8> {
    let client = Client::find(&ctx.config)?;
    match verb {
        RepoCommand::Add { location, name, base, secret, image, all } => {
            let request = AddRepository { url: location, name, base, secret, image };
            let (added, new) = add(ctx, &client, request, all).await?;
            ctx.print.result(&added, |added| format!("{}\n", added.name))?;
            match new {
                true => ctx.print.note(format!("Registered {} as {}", added.url, added.name)),
                false => ctx.print.note(format!("Updated {} from its folder", added.name)),
            }
            ctx.print
                .hint(format!("`harvest repo build {}` makes sessions start faster", added.name));
        }
        RepoCommand::Build { name } => {
            let name = client.repository(&name).await?.name;
            tokio::select! {
                built = build(ctx, &client, &name) => drop(built?),
                _ = tokio::signal::ctrl_c() => {
                    ctx.print.note(format!("\nDetached; the server keeps building {name}"));
                    ctx.print.hint("`harvest repo ls` shows finished builds");
                }
            }
        }
        RepoCommand::Ls => {
            let repositories = client.repositories().await?;
            if repositories.is_empty() && !ctx.print.json {
                ctx.print.note("No repositories yet");
                ctx.print.hint("register one with `harvest repo add URL|FOLDER`");
                return Ok(0);
            }
            let headings = ["NAME", "BUILT", "COMMIT", "CHECK", "IMAGE…", "URL…"];
            ctx.print.list(&repositories, headings, row)?;
        }
        RepoCommand::Rm { name, yes } => {
            let Repository { name, url, .. } = client.repository(&name).await?;
            let copied = url.starts_with(&format!("{}/forge/", client.url()));
            let rest = match copied {
                true => ", its memory and all branches on the local forge",
                false => " and its memory",
            };
            confirm::removal(ctx.print, yes, &format!("{name} with its builds{rest}"))?;
            client.delete(&format!("/v1/repositories/{name}")).await.map_err(|error| {
                match error.downcast::<ApiRefusal>() {
                    Ok(ApiRefusal(problem)) if problem.code == "in_use" => {
                        let hint = format!(
                            "`harvest ls --all -r {name}` lists them, `harvest rm SESSION` removes one"
                        );
                        Advice::new(problem.detail, hint).into()
                    }
                    Ok(refusal) => refusal.into(),
                    Err(error) => error,
                }
            })?;
            ctx.print.document(&json!({ "removed": name }))?;
            ctx.print.note(match copied {
                true => format!(
                    "Removed {name} and its copy on the local forge; the folder is unchanged"
                ),
                false => format!("Removed {name}"),
            });
        }
    }
    Ok(0)
}

/// Registers a URL, or copies a folder to the local forge and registers the copy.
async fn add(
    ctx: &Invocation,
    client: &Client,
    request: AddRepository,
    all: bool,
) -> Result<(Repository, bool)> {
    let folder = Path::new(&request.url);
    if !request.url.contains("://") && !folder.is_dir() {
        let what = match request.url.contains(':') {
            true => format!("`{}` is not an http or https URL", request.url),
            false => format!("there is no folder `{}`", request.url),
        };
        let hint = "name a folder, or a URL such as https://HOST/PATH; `--secret NAME` reads a \
                    private one";
        bail!(Advice::new(what, hint));
    }
    if request.url.contains("://") {
        let added =
            client.repository_add(&request).await.context("cannot register the repository")?;
        return Ok((added, true));
    }
    if let Some(secret) = &request.secret {
        let hint = "leave out `--secret`; it is the token of a remote's URL";
        bail!(Advice::usage(format!("a folder has no use for the secret {secret}"), hint));
    }
    let folder = folder.to_owned();
    let source = Source { folder: &folder, naming: NameConflict::Refuse, all };
    let published = publish(ctx.print, client, &forge(ctx)?, source, request).await?;
    Ok((published.repository, published.new))
}

/// Builds a repository and prints the progress.
pub(crate) async fn build(
    ctx: &Invocation,
    client: &Client,
    name: &RepositoryName,
) -> Result<Build> {
    let request = client.request(Method::POST, &format!("/v1/repositories/{name}/build"));
    let started = client.send(request).await.with_context(|| format!("cannot build {name}"))?;
    let mut lines = Lines::new(started);
    let mut phase: Option<(String, Instant)> = None;
    while let Some(line) = lines.json::<BuildLine>().await? {
        if ctx.print.json {
            ctx.print.item(&line)?;
        }
        match line {
            BuildLine::Progress { message } if ctx.print.is_live() => {
                end_phase(ctx, phase.take());
                let label = describe_phase(&message);
                ctx.print.live(&label, Some(Duration::ZERO));
                phase = Some((label, Instant::now()));
            }
            BuildLine::Progress { message } => {
                ctx.print.note(format!("  {}", describe_phase(&message)))
            }
            BuildLine::EgressRefused { name, reason, hint } => {
                for line in refused_connection(&name, &reason, hint.as_deref()) {
                    ctx.print.note(format!("  {line}"));
                }
            }
            BuildLine::Built { build } => {
                end_phase(ctx, phase.take());
                ctx.print.note(format!(
                    "Built {name} at {} in {}",
                    short_commit(&build.commit),
                    human_millis(build.millis)
                ));
                return Ok(build);
            }
            BuildLine::Failed { message, .. } => bail!("the build of {name} failed: {message}"),
        }
    }
    bail!("the response ended before the build finished")
}

/// Replaces the live line by the duration of the phase that has ended.
fn end_phase(ctx: &Invocation, phase: Option<(String, Instant)>) {
    ctx.print.end_live();
    if let Some((label, began)) = phase {
        ctx.print.note(format!("  {label} ({})", human_elapsed(began)));
    }
}

/// Describes a step of a build; the API names boot phases by their words.
fn describe_phase(message: &str) -> String {
    if let Ok(phase) = serde_json::from_value::<BootPhase>(message.into()) {
        return phase_label(phase).to_owned();
    }
    let mut letters = message.chars();
    letters.next().map_or_else(String::new, |first| first.to_uppercase().chain(letters).collect())
}

fn row(repository: &Repository) -> [String; 6] {
    let none = || "–".to_owned();
    let build = repository.build.as_ref();
    let check = build.and_then(|build| build.check.as_ref());
    [
        repository.name.to_string(),
        build.map_or_else(none, |build| age(build.built_at)),
        build.map_or_else(none, |build| short_commit(&build.commit).to_owned()),
        check.map_or_else(none, |check| check.outcome.to_string()),
        repository.image.clone().unwrap_or_else(|| "default".to_owned()),
        repository.url.clone(),
    ]
}
