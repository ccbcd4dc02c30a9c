//! `harvest sandbox`: sandboxes of one's own. Asks the server where one runs, else this process; only a plan
//! is made by this machine's engine itself.

mod disks;
mod list;

use anyhow::{Result, anyhow, bail};
use harvest_engine::{EngineError, Limits, Network, Origin, Owner, Spec};
use harvest_proto::{
    SandboxId,
    api::machines::{
        CreateSandbox, CreatedSandbox, Sandbox as Made, SandboxLimits, SandboxList, SandboxStatus,
    },
};
use serde_json::json;

use super::{cp, exec::variables, shell};
use crate::{
    Invocation,
    cli::{Create, Sandbox},
    desk::Desk,
    images,
    printer::Advice,
    resolve, wire,
};

pub(crate) async fn run(here: &Invocation, verb: Sandbox) -> Result<u8> {
    if let Sandbox::Plan { image } = verb {
        plan(here, image).await?;
        return Ok(0);
    }
    let desk = Desk::find(&here.config)?;
    match verb {
        Sandbox::Create(args) => create(here, &desk, args).await?,
        Sandbox::Ls => list::ls(here, &desk).await?,
        Sandbox::Inspect(one) => list::inspect(here, &desk, &one.sandbox).await?,
        Sandbox::Cp { from, to, user } => cp::in_sandbox(here, desk, from, to, user).await?,
        Sandbox::Shell(args) => return shell::in_sandbox(&desk, &args.into()).await,
        Sandbox::Snapshot(one) => disks::snapshot(here, &desk, &one.sandbox).await?,
        Sandbox::Restore { what } => disks::restore(here, &desk, &what).await?,
        Sandbox::Fork { sandbox, count } => disks::fork(here, &desk, &sandbox, count).await?,
        Sandbox::Stop(many) => stop(here, &desk, &many.sandboxes).await?,
        Sandbox::Start(many) => start(here, &desk, &many.sandboxes).await?,
        Sandbox::Rm { sandboxes, all, force } => {
            remove(here, &desk, &sandboxes, all, force).await?
        }
        Sandbox::Plan { .. } => unreachable!("a plan needs no desk"),
    }
    Ok(0)
}

async fn create(here: &Invocation, desk: &Desk, args: Create) -> Result<()> {
    let (image, from) = match &args.from {
        Some(snapshot) => (None, Some(resolve::snapshot(desk, snapshot).await?)),
        None => (Some(images::ensure(desk, &args.image, here.print).await?), None),
    };
    let order = CreateSandbox {
        image,
        from,
        limits: SandboxLimits {
            lifetime_secs: args.lifetime.map(|time| time.as_secs().max(1)),
            ..args.limits.limits()
        },
        network: args.net.network(),
        volumes: args.volumes.volumes.clone(),
        state: Some(!args.volumes.no_state),
        env: variables(&args.env)?,
    };
    let id = begin(here, desk, &order).await?;
    here.print.result(&json!({ "id": id }), |_| format!("{id}\n"))?;
    here.print.hint(format!("`harvest exec {id} -- COMMAND` runs something in it"));
    Ok(())
}

/// Starts one, and says what it has to do without.
async fn begin(here: &Invocation, desk: &Desk, order: &CreateSandbox) -> Result<SandboxId> {
    let made: CreatedSandbox = desk.post("/v1/sandboxes", order).await?;
    for warning in made.warnings {
        here.print.note(format!("warning: {warning}"));
    }
    Ok(made.sandbox_id)
}

async fn plan(here: &Invocation, image: Option<String>) -> Result<()> {
    let engine = wire::open_engine(&here.config)?;
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
        made_by: None,
    };
    let plan = tokio::task::spawn_blocking(move || engine.plan(&spec)).await?;
    let plan = plan.map_err(|error| match error {
        EngineError::ImageMissing { .. } => anyhow!(Advice::new(
            format!("there is no image `{image}`"),
            format!(
                "`harvest image build {image}` makes it; `harvest image ls` lists those there are"
            ),
        )),
        other => anyhow::Error::new(other).context("cannot plan a sandbox"),
    })?;
    here.print.result(&plan, ToString::to_string)
}

async fn stop(here: &Invocation, desk: &Desk, typed: &[String]) -> Result<()> {
    let ids = ones_own(desk, typed, "stop", false).await?;
    for id in &ids {
        let stopped: Made = desk.post(&format!("/v1/sandboxes/{id}/stop"), &json!({})).await?;
        here.print.note(match stopped.owner.as_str() {
            "you" => format!("Stopped {id}; its disk is kept"),
            _ => format!("Stopped {id}; its disk goes with the process it belonged to"),
        });
    }
    done(here, "stopped", &ids)
}

async fn start(here: &Invocation, desk: &Desk, typed: &[String]) -> Result<()> {
    let ids = ones_own(desk, typed, "start", false).await?;
    for id in &ids {
        let path = format!("/v1/sandboxes/{id}");
        let before: Made = desk.get(&path).await?;
        desk.post::<Made>(&format!("{path}/start"), &json!({})).await?;
        here.print.note(match before.state {
            SandboxStatus::Dead => format!("Started {id} with the disk it left"),
            SandboxStatus::Running => format!("{id} runs already"),
        });
    }
    done(here, "started", &ids)
}

async fn remove(
    here: &Invocation,
    desk: &Desk,
    typed: &[String],
    all: bool,
    force: bool,
) -> Result<()> {
    let ids = match all {
        false => ones_own(desk, typed, "remove", force).await?,
        // One that belongs to a process is in use by it.
        true => {
            let list: SandboxList = desk.get("/v1/sandboxes").await?;
            list.items.into_iter().filter(|made| made.owner == "you").map(|made| made.id).collect()
        }
    };
    for id in &ids {
        let insist = if force { "?force=true" } else { "" };
        desk.delete(&format!("/v1/sandboxes/{id}{insist}")).await?;
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
async fn ones_own(
    desk: &Desk,
    typed: &[String],
    verb: &str,
    force: bool,
) -> Result<Vec<SandboxId>> {
    let list: SandboxList = desk.get("/v1/sandboxes").await?;
    let mut ids = Vec::new();
    for typed in typed {
        let id = resolve::sandbox_of(&list, typed)?;
        if let Some(torn) = list.torn.iter().find(|torn| torn.id == id && !force) {
            let hint = format!("`harvest sandbox rm --force {id}` throws away what is left of it");
            bail!(Advice::new(torn.error.clone(), hint));
        }
        if !force && list.items.iter().any(|made| made.id == id && made.owner == "session") {
            let hint =
                "see `harvest ls`; `harvest terminate SESSION` ends its sandbox and keeps its disk";
            bail!(Advice::new(format!("cannot {verb} {id}: it belongs to a session"), hint));
        }
        if !ids.contains(&id) {
            ids.push(id);
        }
    }
    Ok(ids)
}
