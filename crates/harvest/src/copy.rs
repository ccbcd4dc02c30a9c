//! What every copy between this machine and a sandbox has in common, whatever way leads there: where the copy
//! goes, and what is told of it. A folder that is there already takes the copy in.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use harvest_engine::guest::{CopiedTree, Far, copy_in, copy_out};
use harvest_proto::bridge::FileKind;
use serde_json::json;

use crate::{Invocation, cli::units, printer::Advice};

/// Copies into a sandbox. `explain` makes of the far side's error what a person is told.
pub(crate) fn into_sandbox<F: Far>(
    far: &mut F,
    from: &Path,
    mut to: String,
    user: Option<&str>,
    explain: fn(F::Error) -> anyhow::Error,
) -> Result<CopiedTree> {
    let into = match far.stat(&to) {
        Ok(about) if about.kind == FileKind::Folder => true,
        // A link to a folder is as good as the folder.
        Ok(about) if about.kind == FileKind::Link => far.list_all(&to).is_ok(),
        Ok(_) => false,
        Err(error) if F::is_missing(&error) => to.ends_with('/'),
        Err(error) => return Err(explain(error)),
    };
    if into {
        // `.` and `/` have no name of their own: what is in them is copied then.
        let name = from.file_name().and_then(|name| name.to_str());
        to = name.map_or_else(|| to.clone(), |name| format!("{}/{name}", to.trim_end_matches('/')));
    }
    copy_in(far, from, &to, user).map_err(explain)
}

/// Copies out of a sandbox.
pub(crate) fn out_of_sandbox<F: Far>(
    far: &mut F,
    from: &str,
    mut to: PathBuf,
    explain: fn(F::Error) -> anyhow::Error,
) -> Result<CopiedTree> {
    if to.is_dir() {
        let name =
            Path::new(from).file_name().context("`/` has no name; say where its copy goes")?;
        to.push(name);
    } else if to.as_os_str().as_encoded_bytes().ends_with(b"/") {
        // Without the slash it would become a file of that name.
        let hint = format!("`mkdir -p {}` makes it", to.display());
        bail!(Advice::new(format!("there is no folder {} here", to.display()), hint));
    }
    copy_out(far, from, &to).map_err(explain)
}

/// Says what was copied.
pub(crate) fn tell(here: &Invocation, copied: CopiedTree) -> Result<()> {
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
