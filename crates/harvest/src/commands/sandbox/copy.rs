//! Copies trees into and out of a sandbox. A folder that is there already takes the copy in.

use anyhow::{Context, Result, bail};
use harvest_engine::{
    SandboxState,
    guest::{Guest, GuestError},
};

use crate::{Invocation, cli::Side, copy, desk::Desk, printer::Advice, resolve, wire};

pub(crate) async fn run(
    here: &Invocation,
    desk: &Desk,
    from: &str,
    to: &str,
    user: Option<String>,
) -> Result<()> {
    let words = format!("cannot copy {from} to {to}");
    let copy = match (Side::parse(from), Side::parse(to)) {
        (Side::Here(from), Side::Inside { sandbox, path }) => {
            let mut guest = dial(here, desk, &sandbox).await?;
            tokio::task::spawn_blocking(move || {
                copy::into_sandbox(&mut guest, &from, path, user.as_deref(), older)
            })
        }
        (Side::Inside { sandbox, path }, Side::Here(to)) => {
            let mut guest = dial(here, desk, &sandbox).await?;
            tokio::task::spawn_blocking(move || copy::out_of_sandbox(&mut guest, &path, to, older))
        }
        (Side::Inside { .. }, Side::Inside { .. }) => {
            bail!(Advice::new("one side of a copy is on this machine", "copy out first, then in"))
        }
        (Side::Here(_), Side::Here(_)) => {
            bail!(Advice::new("neither side is in a sandbox", "write that side as SANDBOX:/path"))
        }
    };
    copy::tell(here, copy.await?.context(words)?)
}

/// By this machine's engine: the sandbox is one of this home, whoever is asked for the rest.
async fn dial(here: &Invocation, desk: &Desk, typed: &str) -> Result<Guest> {
    if !desk.shares_our_files() {
        let hint = "unset HARVEST_URL on the machine that has the sandbox";
        bail!(Advice::new("a sandbox of another machine cannot be copied from or to", hint));
    }
    let id = resolve::sandbox(desk, typed).await?;
    let engine = wire::open_engine(&here.config)?;
    match engine.find(&id)? {
        SandboxState::Running(running) => {
            Guest::dial(&running.bridge).with_context(|| format!("cannot reach {id}"))
        }
        _ => {
            let hint = format!("`harvest sandbox start {id}` starts it with the disk it left");
            bail!(Advice::new(format!("{id} does not run"), hint))
        }
    }
}

/// A supervisor of an earlier version hangs up on a question it does not know.
fn older(error: GuestError) -> anyhow::Error {
    match error {
        GuestError::Broken(_) => {
            let hint = "`harvest sandbox stop` and `harvest sandbox start` give it this version's supervisor";
            let words = "the sandbox went away, or its supervisor is older than this program";
            anyhow::Error::new(error).context(Advice::new(words, hint))
        }
        other => other.into(),
    }
}
