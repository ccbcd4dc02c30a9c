//! Copies trees into and out of a sandbox. A folder that is there already takes the copy in.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use harvest_engine::{
    SandboxState,
    guest::{CopiedTree, Guest, GuestError},
};
use harvest_proto::bridge::{FaultCode, FileKind};
use serde_json::json;

use crate::{
    Invocation,
    cli::{Side, units},
    desk::Desk,
    printer::Advice,
    resolve, wire,
};

pub(super) async fn run(
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
            tokio::task::spawn_blocking(move || copy_in(&mut guest, &from, path, user.as_deref()))
        }
        (Side::Inside { sandbox, path }, Side::Here(to)) => {
            let mut guest = dial(here, desk, &sandbox).await?;
            tokio::task::spawn_blocking(move || copy_out(&mut guest, &path, to))
        }
        (Side::Inside { .. }, Side::Inside { .. }) => {
            bail!(Advice::new("one side of a copy is on this machine", "copy out first, then in"))
        }
        (Side::Here(_), Side::Here(_)) => {
            bail!(Advice::new("neither side is in a sandbox", "write that side as SANDBOX:/path"))
        }
    };
    let copied = copy.await?.context(words)?;
    let CopiedTree { files, bytes, skipped } = copied;
    if here.print.json {
        let document = json!({ "files": files, "bytes": bytes, "skipped": skipped });
        here.print.result(&document, |_| String::new())?;
    }
    here.print.note(format!("Copied {files} files, {}", units::bytes(bytes)));
    if skipped > 0 {
        here.print.note(format!("warning: {skipped} sockets, pipes or devices were left out"));
    }
    Ok(())
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

fn copy_in(guest: &mut Guest, from: &Path, mut to: String, user: Option<&str>) -> Result<CopiedTree> {
    let into = match guest.stat(&to) {
        Ok(about) if about.kind == FileKind::Folder => true,
        // A link to a folder is as good as the folder.
        Ok(about) if about.kind == FileKind::Link => guest.list(&to).is_ok(),
        Ok(_) => false,
        Err(GuestError::Refused(fault)) if fault.code == FaultCode::NotFound => to.ends_with('/'),
        Err(error) => return Err(older(error)),
    };
    if into {
        // `.` and `/` have no name of their own: what is in them is copied then.
        let name = from.file_name().and_then(|name| name.to_str());
        to = name.map_or_else(|| to.clone(), |name| format!("{}/{name}", to.trim_end_matches('/')));
    }
    guest.copy_in(from, &to, user).map_err(older)
}

fn copy_out(guest: &mut Guest, from: &str, mut to: PathBuf) -> Result<CopiedTree> {
    if to.is_dir() {
        let name = Path::new(from).file_name().context("`/` has no name; say where its copy goes")?;
        to.push(name);
    } else if to.as_os_str().as_encoded_bytes().ends_with(b"/") {
        // Without the slash it would become a file of that name.
        let hint = format!("`mkdir -p {}` makes it", to.display());
        bail!(Advice::new(format!("there is no folder {} here", to.display()), hint));
    }
    guest.copy_out(from, &to).map_err(older)
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
