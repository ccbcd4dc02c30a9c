//! `harvest sandbox`: sandboxes of one's own, by this machine's engine. Needs no server and is in no
//! server's way.

pub(super) mod copy;
mod disks;
mod list;

use anyhow::{Context, Result, anyhow, bail};
use harvest_engine::{Engine, EngineError, Limits, Network, Origin, Owner, SandboxState, Spec};
use harvest_proto::SandboxId;
use serde_json::json;

use super::exec::variables;
use crate::{
    Invocation,
    begin::begin,
    cli::{Create, Sandbox},
    images,
    printer::Advice,
    resolve, wire,
};

pub(crate) async fn run(here: &Invocation, verb: Sandbox) -> Result<u8> {
    let engine = wire::open_engine(&here.config)?;
    match verb {
        Sandbox::Create(args) => create(here, engine, args).await?,
        Sandbox::Ls => list::ls(here, &engine)?,
        Sandbox::Inspect(one) => list::inspect(here, &engine, &one.sandbox)?,
        Sandbox::Cp { from, to, user } => copy::run(here, engine, &from, &to, user).await?,
        Sandbox::Snapshot(one) => disks::snapshot(here, engine, &one.sandbox).await?,
        Sandbox::Restore { what } => disks::restore(here, engine, &what).await?,
        Sandbox::Fork { sandbox, count } => disks::fork(here, engine, &sandbox, count).await?,
        Sandbox::Stop(many) => stop(here, engine, &many.sandboxes).await?,
        Sandbox::Start(many) => start(here, engine, &many.sandboxes).await?,
        Sandbox::Plan { image } => plan(here, engine, image).await?,
        Sandbox::Rm { sandboxes, all, force } => remove(here, engine, &sandboxes, all, force).await?,
    }
    Ok(0)
}

/// Makes a call of the engine where it may block.
async fn blocking<T: Send + 'static>(
    engine: &Engine,
    call: impl FnOnce(&Engine) -> Result<T, EngineError> + Send + 'static,
) -> Result<T> {
    let engine = engine.clone();
    Ok(tokio::task::spawn_blocking(move || call(&engine)).await??)
}

async fn create(here: &Invocation, engine: Engine, args: Create) -> Result<()> {
    let from = match &args.from {
        Some(snapshot) => Origin::Snapshot(resolve::snapshot(&engine, snapshot)?),
        None => Origin::Image(images::ensure(&engine, &here.config.home, &args.image, here.print).await?),
    };
    let spec = Spec {
        id: SandboxId::random(),
        from,
        limits: Limits {
            lifetime_secs: args.lifetime.map(|time| time.as_secs().max(1)),
            ..args.limits.limits()
        },
        network: args.net.network(),
        owner: Owner::Kept,
        binds: Vec::new(),
        volumes: args.volumes.volumes.clone(),
        env: variables(&args.env)?,
    };
    let (id, print) = (spec.id.clone(), here.print);
    tokio::task::spawn_blocking(move || begin(&engine, spec, !args.volumes.no_state, print)).await??;
    here.print.result(&json!({ "id": id }), |_| format!("{id}\n"))?;
    here.print.hint(format!("`harvest exec {id} -- COMMAND` runs something in it"));
    Ok(())
}

async fn plan(here: &Invocation, engine: Engine, image: Option<String>) -> Result<()> {
    let image = image.unwrap_or_else(|| here.config.image.clone());
    // What a session's sandbox gets, but for its repository's snapshot.
    let spec = Spec {
        id: SandboxId::random(),
        from: Origin::Image(image.clone()),
        limits: Limits::default(),
        network: Network::Door,
        owner: Owner::Sessions,
        binds: Vec::new(),
        volumes: Vec::new(),
        env: Default::default(),
    };
    let plan = tokio::task::spawn_blocking(move || engine.plan(&spec)).await?;
    let plan = plan.map_err(|error| match error {
        EngineError::ImageMissing { .. } => anyhow!(Advice::new(
            format!("there is no image `{image}`"),
            format!("`harvest image build {image}` makes it; `harvest image ls` lists those there are"),
        )),
        other => anyhow::Error::new(other).context("cannot plan a sandbox"),
    })?;
    here.print.result(&plan, ToString::to_string)
}

async fn stop(here: &Invocation, engine: Engine, typed: &[String]) -> Result<()> {
    let ids = one_s_own(&engine, typed, "stop", false)?;
    for id in &ids {
        let same = id.clone();
        let is_kept = engine.inspect(id)?.is_some_and(|sandbox| sandbox.spec.owner == Owner::Kept);
        blocking(&engine, move |engine| engine.kill(&same))
            .await
            .with_context(|| format!("cannot stop {id}"))?;
        here.print.note(match is_kept {
            true => format!("Stopped {id}; its disk is kept"),
            false => format!("Stopped {id}; its disk goes with the process it belonged to"),
        });
    }
    done(here, "stopped", &ids)
}

async fn start(here: &Invocation, engine: Engine, typed: &[String]) -> Result<()> {
    let ids = one_s_own(&engine, typed, "start", false)?;
    for id in &ids {
        let same = id.clone();
        let started = blocking(&engine, move |engine| match engine.find(&same)? {
            SandboxState::Running(_) => Ok(false),
            _ => engine.start_again(&same).map(|_| true),
        });
        match started.await.with_context(|| format!("cannot start {id}"))? {
            true => here.print.note(format!("Started {id} with the disk it left")),
            false => here.print.note(format!("{id} runs already")),
        }
    }
    done(here, "started", &ids)
}

async fn remove(here: &Invocation, engine: Engine, typed: &[String], all: bool, force: bool) -> Result<()> {
    let ids = match all {
        false => one_s_own(&engine, typed, "remove", force)?,
        // One that belongs to a process is in use by it.
        true => engine.list_of(Owner::Kept).context("cannot list sandboxes")?,
    };
    for id in &ids {
        let same = id.clone();
        blocking(&engine, move |engine| engine.remove(&same))
            .await
            .with_context(|| format!("cannot remove {id}"))?;
        here.print.note(format!("Removed {id}"));
    }
    done(here, "removed", &ids)
}

fn done(here: &Invocation, word: &str, ids: &[SandboxId]) -> Result<()> {
    match here.print.json {
        true => here.print.result(&json!({ word: ids }), |_| String::new()),
        false => Ok(()),
    }
}

/// The sandboxes a person means. All are looked up first: a slip in the last must not cost the first.
/// What a session works in is the session's, unless they insist.
fn one_s_own(engine: &Engine, typed: &[String], verb: &str, force: bool) -> Result<Vec<SandboxId>> {
    let mut ids = Vec::new();
    for typed in typed {
        let id = resolve::sandbox(engine, typed)?;
        let owner = match engine.inspect(&id) {
            // Whose it is cannot be told, and they insist.
            Err(EngineError::Record { .. }) if force => None,
            Err(error @ EngineError::Record { .. }) => {
                let hint = format!("`harvest sandbox rm --force {id}` throws away what is left of it");
                bail!(Advice::new(error.to_string(), hint));
            }
            found => found?.map(|sandbox| sandbox.spec.owner),
        };
        if owner == Some(Owner::Sessions) && !force {
            let hint =
                "see `harvest ls`; `harvest stop --terminate SESSION` ends its sandbox and keeps its disk";
            bail!(Advice::new(format!("cannot {verb} {id}: it belongs to a session"), hint));
        }
        if !ids.contains(&id) {
            ids.push(id);
        }
    }
    Ok(ids)
}
