//! Builds of repositories: starts them, lists them, prints their logs.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use harvest_proto::{
    BranchName, RepositoryName, RepositoryRef, SnapshotId,
    api::{Build, BuildLine, BuildRepository, BuildStatus, BuildSummary, Repository},
    event::BootPhase,
};
use reqwest::Method;
use serde::Serialize;

use crate::{
    Invocation,
    client::Client,
    commands::ls::age,
    follow::Lines,
    printer::{Advice, human_elapsed, human_millis},
    publish::refresh,
    render::{install_step, phase_label, refused_connection, short_commit},
    sanitize::sanitize,
};

/// Builds one repository or all.
pub(super) async fn run(
    ctx: &Invocation,
    client: &Client,
    name: Option<String>,
    all: bool,
    order: &BuildRepository,
) -> Result<u8> {
    let repositories = match name {
        Some(name) if !all => vec![wanted(client, ctx, &name).await?],
        _ => client.repositories().await?,
    };
    let mut failed = 0;
    for repository in &repositories {
        let name = &repository.name;
        refresh(ctx, client, repository).await?;
        tokio::select! {
            built = build(ctx, client, repository, order) => match built {
                Ok(_) => {}
                Err(error) if !all => return Err(error),
                Err(error) => {
                    failed += 1;
                    ctx.print.warn(format!("{error:#}"));
                }
            },
            _ = tokio::signal::ctrl_c() => {
                ctx.print.note(format!("\nDetached; the server keeps building {name}"));
                ctx.print.hint(format!("`harvest repo builds {name}` shows its builds"));
                return Ok(0);
            }
        }
    }
    match failed {
        0 => Ok(0),
        _ => bail!("{failed} of {} builds failed", repositories.len()),
    }
}

/// The repository that a user means by a name or a folder.
async fn wanted(client: &Client, ctx: &Invocation, name: &str) -> Result<Repository> {
    let folder = Path::new(name);
    // `app` is a name, `./app` and `.` are folders.
    if !name.starts_with(['.', '/']) || !folder.is_dir() {
        let name: RepositoryRef = name.parse().map_err(|error| {
            Advice::usage(format!("{error}"), "`harvest repo ls` lists repositories")
        })?;
        return client.repository(&name).await;
    }
    let folder = folder.canonicalize().with_context(|| format!("cannot find {name}"))?;
    let forge = crate::publish::forge(ctx)?;
    let known = client.repositories().await?;
    let found = known.into_iter().find(|known| {
        let copy = forge.repository_name(&known.url);
        copy.and_then(|copy| forge.source_folder(copy.name())).as_deref() == Some(&*folder)
    });
    found.ok_or_else(|| {
        let what = format!("{name} is not registered");
        Advice::new(what, format!("register it with `harvest repo add {name}`")).into()
    })
}

pub(super) async fn list(ctx: &Invocation, client: &Client, name: &RepositoryRef) -> Result<()> {
    let name = client.repository(name).await?.name;
    let builds: Vec<BuildSummary> = client.all(&format!("/v1/repositories/{name}/builds")).await?;
    if builds.is_empty() && !ctx.print.json {
        ctx.print.note(format!("No builds of {name} yet"));
        ctx.print.hint(format!("`harvest repo build {name}` builds it"));
        return Ok(());
    }
    let headings = ["BUILD", "STATUS", "AGE", "TOOK", "BRANCH", "COMMIT", "DEPENDENCIES", "ERROR…"];
    ctx.print.list(&builds, headings, row)
}

fn row(build: &BuildSummary) -> [String; 8] {
    let none = || "–".to_owned();
    [
        build.snapshot_id.to_string(),
        build.status.to_string(),
        age(build.started_at),
        build.millis.map_or_else(none, human_millis),
        build.branch.as_ref().map_or_else(|| "base".to_owned(), ToString::to_string),
        build.commit.as_deref().map_or_else(none, |commit| short_commit(commit).to_owned()),
        build.package_manager.clone().unwrap_or_else(none),
        build.error.as_ref().and_then(|error| error.lines().next()).unwrap_or("").to_owned(),
    ]
}

pub(super) async fn log(
    ctx: &Invocation,
    client: &Client,
    name: &RepositoryRef,
    build: Option<SnapshotId>,
) -> Result<()> {
    let name = client.repository(name).await?.name;
    let path = format!("/v1/repositories/{name}/builds");
    let build = match build {
        Some(build) => build,
        None => {
            let builds: Vec<BuildSummary> = client.all(&path).await?;
            let ended = builds.into_iter().find(|build| build.status != BuildStatus::Building);
            let ended = ended.with_context(|| format!("no build of {name} has ended yet"))?;
            ended.snapshot_id
        }
    };
    let log: harvest_proto::api::BuildLog = client.get(&format!("{path}/{build}")).await?;
    ctx.print.result(&log, |log| {
        let error = log.build.error.as_ref().map_or_else(String::new, |error| format!("{error}\n"));
        sanitize(&(log.log.clone() + &error))
    })
}

/// The result of a build, for programs.
#[derive(Serialize)]
struct BuildResult<'a> {
    success: bool,
    status: &'static str,
    snapshot_id: Option<&'a SnapshotId>,
    repo: &'a RepositoryName,
    branch: Option<&'a BranchName>,
    package_manager: Option<&'a str>,
    commit: Option<&'a str>,
    duration_secs: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<&'a str>,
}

impl<'a> BuildResult<'a> {
    fn new(
        repository: &'a Repository,
        order: &'a BuildRepository,
        built: Result<&'a Build, &'a str>,
        duration: Duration,
    ) -> Self {
        let build = built.ok();
        Self {
            success: build.is_some(),
            status: if build.is_some() { "success" } else { "failed" },
            snapshot_id: build.map(|build| &build.snapshot_id),
            repo: &repository.name,
            branch: order.branch.as_ref().or(repository.base.as_ref()),
            package_manager: build.and_then(|build| build.package_manager.as_deref()),
            commit: build.map(|build| build.commit.as_str()),
            duration_secs: duration.as_secs_f64(),
            error: built.err(),
        }
    }
}

/// Builds a repository and prints the progress; with `--json` the lines of the API, and last the
/// result.
pub(crate) async fn build(
    ctx: &Invocation,
    client: &Client,
    repository: &Repository,
    order: &BuildRepository,
) -> Result<Build> {
    let (name, began) = (&repository.name, Instant::now());
    let request = client.request(Method::POST, &format!("/v1/repositories/{name}/build"));
    let request = request.json(order);
    let started = client.send(request).await.with_context(|| format!("cannot build {name}"))?;
    let mut lines = Lines::new(started);
    let mut phase: Option<(String, Instant)> = None;
    while let Some(line) = lines.json::<BuildLine>().await? {
        if ctx.print.json {
            match &line {
                BuildLine::Built { build } => ctx.print.item(&BuildResult::new(
                    repository,
                    order,
                    Ok(build),
                    began.elapsed(),
                ))?,
                BuildLine::Failed { message, .. } => ctx.print.item(&BuildResult::new(
                    repository,
                    order,
                    Err(message),
                    began.elapsed(),
                ))?,
                progress => ctx.print.item(progress)?,
            }
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
            BuildLine::InstallStep { folder, command, millis, failure, tail, .. } => {
                let step = (folder.as_str(), command.as_str());
                for line in install_step(step, millis, failure.as_deref(), &tail) {
                    ctx.print.note(line);
                }
            }
            BuildLine::Warning { message } => ctx.print.warn(message),
            BuildLine::Built { build } => {
                end_phase(ctx, phase.take());
                ctx.print.note(format!(
                    "Built {name} at {} in {}",
                    short_commit(&build.commit),
                    human_millis(build.millis)
                ));
                return Ok(*build);
            }
            BuildLine::Failed { code, message } => {
                let hint = match code.as_str() {
                    "no_room" => {
                        "`harvest df` shows what fills the disk, `harvest gc` frees space; \
                                  `limits.disk` is the size of a sandbox's own"
                            .to_owned()
                    }
                    _ => format!("`harvest repo logs {name}` prints its log"),
                };
                bail!(Advice::new(format!("the build of {name} failed: {message}"), hint))
            }
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
