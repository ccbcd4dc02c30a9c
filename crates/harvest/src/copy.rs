//! Copies files between this machine and a sandbox: resolves the target path and reports the
//! result. A copy to an existing folder goes into that folder.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use harvest_engine::supervisor_client::{CopiedTree, RemoteFs, copy_in, copy_out};
use harvest_proto::bridge::FileKind;
use serde_json::json;

use crate::{
    Invocation,
    cli::units,
    printer::{Advice, count},
    remote_fs::SandboxFiles,
};

pub(crate) fn into_sandbox(
    files: &mut SandboxFiles,
    from: &Path,
    mut to: String,
    user: Option<&str>,
) -> Result<CopiedTree> {
    let into = match files.stat(&to) {
        Ok(about) if about.kind == FileKind::Folder => true,
        // A link to a folder counts as a folder.
        Ok(about) if about.kind == FileKind::Link => files.list_all(&to).is_ok(),
        Ok(_) => false,
        Err(error) if SandboxFiles::is_missing(&error) => to.ends_with('/'),
        Err(error) => return Err(error),
    };
    if into {
        // `.` and `/` have no name: their contents are copied.
        let name = from.file_name().and_then(|name| name.to_str());
        to = name.map_or_else(|| to.clone(), |name| format!("{}/{name}", to.trim_end_matches('/')));
    }
    copy_in(files, from, &to, user)
}

pub(crate) fn out_of_sandbox(
    files: &mut SandboxFiles,
    from: &str,
    mut to: PathBuf,
) -> Result<CopiedTree> {
    if to.is_dir() {
        let name =
            Path::new(from).file_name().context("`/` has no name; give the full target path")?;
        to.push(name);
    } else if to.as_os_str().as_encoded_bytes().ends_with(b"/") {
        // A missing folder must not become a file of that name.
        let hint = format!("create it with `mkdir -p {}`", to.display());
        bail!(Advice::new(format!("the folder {} does not exist", to.display()), hint));
    }
    copy_out(files, from, &to)
}

/// Prints the result of a copy.
pub(crate) fn report(ctx: &Invocation, copied: CopiedTree) -> Result<()> {
    let CopiedTree { files, bytes, skipped } = copied;
    ctx.print.document(&json!({ "files": files, "bytes": bytes, "skipped": skipped }))?;
    ctx.print.note(format!("Copied {}, {}", count(files, "file"), units::bytes(bytes)));
    if skipped > 0 {
        ctx.print.warn(format!("skipped {} (sockets, pipes or devices)", count(skipped, "file")));
    }
    Ok(())
}
