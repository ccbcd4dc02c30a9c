//! `harvest sandbox`: standalone sandboxes. Uses the server if one runs, else this process; only
//! `plan` always uses the local engine.

mod disks;
mod list;

use std::{pin::pin, time::Duration};

use anyhow::{Result, anyhow, bail};
use harvest_engine::{EngineError, Limits, Network, Origin, Owner, Spec};
use harvest_proto::{
    AgentName, NetworkPolicy, SandboxId,
    api::{
        CreateSandbox, CreatedSandbox, Sandbox, SandboxDoor, SandboxLimits, SandboxList,
        SandboxNetwork, SandboxOwner, SandboxStatus,
    },
};
use harvest_session::{ALL_AGENTS, default_image};
use serde_json::json;

use super::{cp, exec::variables, shell};
use crate::{
    Invocation,
    backend::Backend,
    cli::{CreateArgs, Net, NetFlags, SandboxCommand},
    confirm, images,
    printer::Advice,
    resolve, server_process,
};

// A start takes less, unless it waits for a slot.
const WAIT_NOTE: Duration = Duration::from_secs(2);

pub(crate) async fn run(ctx: &Invocation, verb: SandboxCommand) -> Result<u8> {
    if let SandboxCommand::Plan { image } = verb {
        plan(ctx, image).await?;
        return Ok(0);
    }
    let backend = Backend::find(&ctx.config)?;
    match verb {
        SandboxCommand::Create(args) => create(ctx, &backend, args).await?,
        SandboxCommand::Ls => list::ls(ctx, &backend).await?,
        SandboxCommand::Inspect(one) => list::inspect(ctx, &backend, &one.sandbox).await?,
        SandboxCommand::Cp { from, to, user } => {
            return cp::in_sandbox(ctx, backend, from, to, user).await;
        }
        SandboxCommand::Shell(args) => return shell::in_sandbox(&backend, &args.into()).await,
        SandboxCommand::Snapshot(one) => disks::snapshot(ctx, &backend, &one.sandbox).await?,
        SandboxCommand::Restore { what } => disks::restore(ctx, &backend, &what).await?,
        SandboxCommand::Fork { sandbox, count } => {
            disks::fork(ctx, &backend, &sandbox, count).await?
        }
        SandboxCommand::Stop(many) => stop(ctx, &backend, &many.sandboxes).await?,
        SandboxCommand::Start(many) => start(ctx, &backend, &many.sandboxes).await?,
        SandboxCommand::Rm { sandboxes, all, force, yes } => {
            let yes = yes || !(all || force);
            remove(ctx, &backend, (&sandboxes, all), force, yes).await?
        }
        SandboxCommand::Plan { .. } => unreachable!("handled above"),
    }
    Ok(0)
}

async fn create(ctx: &Invocation, backend: &Backend, args: CreateArgs) -> Result<()> {
    let (image, from) = match &args.from {
        Some(snapshot) => (None, Some(resolve::snapshot(backend, snapshot).await?)),
        None => (Some(images::ensure(backend, &args.image, ctx.print).await?), None),
    };
    let (network, door) = network(&args.net)?;
    let request = CreateSandbox {
        image,
        from,
        limits: SandboxLimits {
            lifetime_secs: args.lifetime.map(|time| time.as_secs().max(1)),
            ..args.limits.limits()
        },
        network,
        door,
        volumes: args.volumes.volumes.clone(),
        state: args.volumes.no_state.then_some(false),
        env: variables(&args.env)?,
    };
    let id = start_new(ctx, backend, &request).await?;
    ctx.print.result(&json!({ "id": id }), |_| format!("{id}\n"))?;
    ctx.print.hint(format!("`harvest exec {id} -- COMMAND` runs a command in it"));
    Ok(())
}

/// The network and the door that flags ask for.
pub(crate) fn network(flags: &NetFlags) -> Result<(SandboxNetwork, Option<SandboxDoor>)> {
    let policy = match flags.net {
        Net::None if flags.allow.is_empty() => return Ok((SandboxNetwork::None, None)),
        Net::None => NetworkPolicy::None,
        Net::Trusted => NetworkPolicy::Trusted,
        Net::Full => NetworkPolicy::Full,
        Net::Host if flags.allow.is_empty() => return Ok((SandboxNetwork::Host, None)),
        Net::Host => {
            let hint = "omit `--allow`, or use `--net none` to reach these names only";
            bail!(Advice::new("the host's network already reaches every name", hint));
        }
    };
    let door = SandboxDoor { policy, allow: flags.allow.clone() };
    Ok((SandboxNetwork::Gateway, Some(door)))
}

/// Starts a sandbox and prints its warnings.
async fn start_new(
    ctx: &Invocation,
    backend: &Backend,
    request: &CreateSandbox,
) -> Result<SandboxId> {
    let mut creating = pin!(backend.post("/v1/sandboxes", request));
    let created: CreatedSandbox = match tokio::time::timeout(WAIT_NOTE, &mut creating).await {
        Ok(created) => created?,
        Err(_) => {
            ctx.print.note("Waiting for the server; it may have no free slot");
            creating.await?
        }
    };
    for warning in created.warnings {
        ctx.print.note(format!("warning: {warning}"));
    }
    Ok(created.sandbox_id)
}

async fn plan(ctx: &Invocation, image: Option<String>) -> Result<()> {
    let engine = server_process::open_engine(&ctx.config)?;
    let image = match image.or_else(|| ctx.config.image.clone()) {
        Some(image) => image,
        None => {
            let has_all = engine.image(ALL_AGENTS)?.is_some();
            default_image(&AgentName::default(), has_all).to_owned()
        }
    };
    // The spec of a session's sandbox, without a repository's snapshot.
    let spec = Spec {
        id: SandboxId::random(),
        from: Origin::Image(image.clone()),
        limits: Limits::default(),
        network: Network::Door,
        owner: Owner::Sessions,
        binds: Vec::new(),
        door: None,
        settings: Default::default(),
        volumes: Vec::new(),
        env: Default::default(),
        made_by: None,
    };
    let plan = tokio::task::spawn_blocking(move || engine.plan(&spec)).await?;
    let plan = plan.map_err(|error| match error {
        EngineError::ImageMissing { .. } => anyhow!(Advice::new(
            format!("there is no image `{image}`"),
            format!("`harvest image build {image}` builds it; `harvest image ls` lists images"),
        )),
        other => anyhow::Error::new(other).context("cannot plan a sandbox"),
    })?;
    ctx.print.result(&plan, ToString::to_string)
}

async fn stop(ctx: &Invocation, backend: &Backend, typed: &[String]) -> Result<()> {
    let ids = resolve_own(backend, typed, "stop", false).await?;
    for id in &ids {
        let stopped: Sandbox =
            backend.post(&format!("/v1/sandboxes/{id}/stop"), &json!({})).await?;
        ctx.print.note(match stopped.owner {
            SandboxOwner::Standalone => format!("Stopped {id}; its disk is kept"),
            _ => format!("Stopped {id}; its disk is removed with the process that started it"),
        });
    }
    done(ctx, "stopped", &ids)
}

async fn start(ctx: &Invocation, backend: &Backend, typed: &[String]) -> Result<()> {
    let ids = resolve_own(backend, typed, "start", false).await?;
    for id in &ids {
        let path = format!("/v1/sandboxes/{id}");
        let before: Sandbox = backend.get(&path).await?;
        backend.post::<Sandbox>(&format!("{path}/start"), &json!({})).await?;
        ctx.print.note(match before.state {
            SandboxStatus::Dead => format!("Started {id} with its disk"),
            SandboxStatus::Running => format!("{id} is already running"),
        });
    }
    done(ctx, "started", &ids)
}

async fn remove(
    ctx: &Invocation,
    backend: &Backend,
    (typed, all): (&[String], bool),
    force: bool,
    yes: bool,
) -> Result<()> {
    let ids: Vec<SandboxId> = match all {
        false => resolve_own(backend, typed, "remove", force).await?,
        // A sandbox of a running process is in use.
        true => {
            let list: SandboxList = backend.get("/v1/sandboxes").await?;
            list.items
                .into_iter()
                .filter(|sandbox| sandbox.owner == SandboxOwner::Standalone)
                .map(|sandbox| sandbox.id)
                .collect()
        }
    };
    if !ids.is_empty() {
        let shown = ids.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        confirm::removal(ctx.print, yes, &format!("{shown} with all files"))?;
    }
    for id in &ids {
        let query = if force { "?force=true" } else { "" };
        backend.delete(&format!("/v1/sandboxes/{id}{query}")).await?;
        ctx.print.note(format!("Removed {id}"));
    }
    done(ctx, "removed", &ids)
}

fn done(ctx: &Invocation, word: &str, ids: &[SandboxId]) -> Result<()> {
    ctx.print.document(&json!({ word: ids }))
}

/// Resolves all ids before any sandbox changes. Sandboxes of sessions are refused, except with
/// `--force`.
async fn resolve_own(
    backend: &Backend,
    typed: &[String],
    verb: &str,
    force: bool,
) -> Result<Vec<SandboxId>> {
    let list: SandboxList = backend.get("/v1/sandboxes").await?;
    let mut ids = Vec::new();
    for typed in typed {
        let id = resolve::sandbox_of(&list, typed)?;
        if let Some(damaged) = list.damaged.iter().find(|damaged| damaged.id == id && !force) {
            let hint = format!("`harvest sandbox rm --force {id}` removes the rest of it");
            bail!(Advice::new(damaged.error.clone(), hint));
        }
        let of_session = |sandbox: &Sandbox| sandbox.owner == SandboxOwner::Session;
        if !force && list.items.iter().any(|sandbox| sandbox.id == id && of_session(sandbox)) {
            let hint = "`harvest terminate SESSION` stops a session's sandbox and saves its disk";
            bail!(Advice::new(format!("cannot {verb} {id}: it belongs to a session"), hint));
        }
        if !ids.contains(&id) {
            ids.push(id);
        }
    }
    Ok(ids)
}
