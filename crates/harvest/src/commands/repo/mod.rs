//! `harvest repo`: registers, changes, prebuilds, lists and removes repositories.

mod app;
mod builds;

use std::path::Path;

use anyhow::{Context, Result, bail};
use harvest_proto::{
    api::{AddRepository, BuildRepository, Repository, RepositoryConfig, UpdateRepository},
    repository_address::{ADDRESS_FORMS, is_short, of_ssh},
};
use serde_json::json;

pub(crate) use self::builds::build;
use super::ls::age;
use crate::{
    Invocation,
    cli::{RepoCommand, RepoSetting},
    client::Client,
    confirm,
    inputs::https_address,
    printer::{Advice, ApiRefusal, human_millis},
    publish::{NameConflict, Source, forge, publish},
    render::short_commit,
    sanitize::sanitize,
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
        RepoCommand::Set { name, base, secret, image, unset } => {
            let name = client.repository(&name).await?.name;
            let value = |given, setting| match unset.contains(&setting) {
                true => Some(None),
                false => given,
            };
            let update = UpdateRepository {
                base: match unset.contains(&RepoSetting::Base) {
                    true => Some(None),
                    false => base.map(Some),
                },
                secret: value(secret.map(Some), RepoSetting::Secret),
                image: value(image.map(Some), RepoSetting::Image),
            };
            if update == UpdateRepository::default() {
                let hint = "give `--base`, `--secret`, `--image` or `--unset WHAT`";
                bail!(Advice::usage("nothing to change", hint));
            }
            let changed = client.repository_update(&name, &update).await;
            let changed = changed.with_context(|| format!("cannot change {name}"))?;
            ctx.print.document(&changed)?;
            ctx.print.note(format!("Changed {name}"));
            if changed.build.is_some() {
                ctx.print.hint(format!(
                    "sessions start from the build of {} until `harvest repo build {name}`",
                    changed.build.as_ref().map_or("", |build| short_commit(&build.commit))
                ));
            }
        }
        RepoCommand::Show { name } => {
            let repository = client.repository(&name).await?;
            ctx.print.result(&repository, |repository| sanitize(&describe(repository)))?;
        }
        RepoCommand::App { name, key, repositories } => {
            app::run(ctx, &client, name, &key, &repositories).await?;
        }
        RepoCommand::Build { name, all, branch, force, wait } => {
            let order = BuildRepository { branch, force, wait };
            return builds::run(ctx, &client, name, all, &order).await;
        }
        RepoCommand::Builds { name } => builds::list(ctx, &client, &name).await?,
        RepoCommand::Logs { name, build } => builds::log(ctx, &client, &name, build).await?,
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
    if !folder.is_dir() || request.url.contains("://") {
        let address = &request.url;
        if folder.exists()
            || !(address.contains("://") || of_ssh(address).is_some() || is_short(address))
        {
            let what = match address.contains(':') {
                true => format!("`{address}` is no address of a repository"),
                false => format!("there is no folder `{address}`"),
            };
            let hint =
                format!("use {ADDRESS_FORMS}, or a folder; `--secret NAME` reads a private one");
            bail!(Advice::new(what, hint));
        }
        let request = AddRepository { url: https_address(ctx.print, address), ..request };
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

/// A repository as lines of `name  value`.
fn describe(repository: &Repository) -> String {
    let mut text = String::new();
    let mut add = |name: &str, value: &str| text += &format!("{name:<14}{value}\n");
    add("repository", repository.name.as_str());
    add("url", &repository.url);
    add("base", repository.base.as_ref().map_or("the remote's default branch", |base| base));
    add("secret", repository.secret.as_deref().unwrap_or("none"));
    add("image", repository.image.as_deref().unwrap_or("default"));
    match &repository.build {
        None => add("build", "none: sessions clone and install at their start"),
        Some(build) => {
            let (commit, time) = (short_commit(&build.commit), human_millis(build.millis));
            add("build", &format!("{commit}, {} ago, took {time}", age(build.built_at)));
            add("dependencies", build.package_manager.as_deref().unwrap_or("none found"));
            let check = build.check.as_ref();
            add("check", check.map_or("none", |check| check.outcome.as_str()));
            if let Some(config) = &build.config {
                add("config", &declared(config));
            }
        }
    }
    text
}

/// What `.harvest/config.toml` says, on one line.
fn declared(config: &RepositoryConfig) -> String {
    let list = |name: &str, values: &[String]| {
        (!values.is_empty()).then(|| format!("{name} {}", values.join(" ")))
    };
    let value = |name: &str, value: Option<String>| value.map(|value| format!("{name} {value}"));
    let names = |values: &std::collections::BTreeMap<String, String>| -> Vec<String> {
        values.keys().cloned().collect()
    };
    let ports: Vec<String> = config.ports.iter().map(u16::to_string).collect();
    let parts = [
        value("image", config.image.clone()),
        list("packages", &config.packages),
        list("env", &names(&config.env)),
        config.setup.is_some().then(|| "setup".to_owned()),
        config.test.is_some().then(|| "test".to_owned()),
        config.check.is_some().then(|| "check".to_owned()),
        list("ports", &ports),
        value("network", config.policy.network.map(|policy| policy.to_string())),
        list("allow", &config.policy.allow),
        value("budget", config.budget_micros.map(|budget| budget.to_string())),
    ];
    let parts: Vec<String> = parts.into_iter().flatten().collect();
    if parts.is_empty() { "empty".to_owned() } else { parts.join(", ") }
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
