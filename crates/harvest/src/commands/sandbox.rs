//! `harvest sandbox`: how a sandbox is made. Starts none.

use anyhow::{Result, anyhow};
use harvest_engine::{EngineError, Limits, Network, Origin, Owner, Spec};
use harvest_proto::SandboxId;

use crate::{Invocation, cli::Sandbox, printer::Advice, wire};

pub(crate) async fn run(here: &Invocation, verb: Sandbox) -> Result<u8> {
    let Sandbox::Plan { image } = verb;
    let image = image.unwrap_or_else(|| here.config.image.clone());
    let engine = wire::open_engine(&here.config)?;
    // What a session's sandbox gets, but for its repository's snapshot.
    let spec = Spec {
        id: SandboxId::random(),
        from: Origin::Image(image.clone()),
        limits: Limits::default(),
        network: Network::Door,
        owner: Owner::Kept,
        binds: vec![],
        volumes: vec![],
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
    here.print.result(&plan, ToString::to_string)?;
    Ok(0)
}
