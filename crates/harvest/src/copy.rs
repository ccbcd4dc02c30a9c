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
    commands::FAILED,
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

/// Prints the result of a copy with every file that was left out; returns the exit code.
pub(crate) fn report(ctx: &Invocation, copied: CopiedTree) -> Result<u8> {
    let CopiedTree { files, bytes, special, not_utf8 } = copied;
    ctx.print.document(&json!({
        "files": files, "bytes": bytes, "special": special, "not_utf8": not_utf8
    }))?;
    ctx.print.note(format!("Copied {}, {}", count(files, "file"), units::bytes(bytes)));
    for path in &special {
        ctx.print.warn(format!("skipped {path} (a socket, pipe or device)"));
    }
    for path in &not_utf8 {
        ctx.print.warn(format!("skipped {path} (its name or link target is not UTF-8)"));
    }
    if not_utf8.is_empty() {
        return Ok(0);
    }
    ctx.print.hint("rename these files, or copy them inside a tar archive");
    Ok(FAILED)
}
