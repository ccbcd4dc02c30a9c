//! `harvest cp`: copies files between this machine and a session's sandbox or a standalone sandbox.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use harvest_engine::supervisor_client::{CopiedTree, RemoteFs};
use harvest_proto::{
    api::{Sandbox, SandboxStatus},
    bridge::FileKind,
};

use crate::{
    Invocation,
    backend::Backend,
    cli::{CopySide, CpArgs},
    copy,
    printer::{Advice, write_bytes},
    remote_fs::SandboxFiles,
    resolve,
};

pub(crate) async fn run(ctx: &Invocation, args: CpArgs) -> Result<u8> {
    let (target, job) = CopyJob::parse(&args.from, &args.to)?;
    if target.starts_with("sbx_") {
        let (files, user) = of_sandbox(Backend::find(&ctx.config)?, &target, args.user).await?;
        return job.run(ctx, files, user, args.recursive).await;
    }
    let (client, session) = ctx.session(&target).await?;
    let route = format!("/v1/sessions/{session}/files");
    let files = SandboxFiles::new(Backend::from_client(client), route, args.user.clone());
    job.run(ctx, files, args.user, args.recursive).await
}

/// `harvest sandbox cp`, which always copies folders.
pub(super) async fn in_sandbox(
    ctx: &Invocation,
    backend: Backend,
    from: String,
    to: String,
    user: Option<String>,
) -> Result<u8> {
    let (target, job) = CopyJob::parse(&from, &to)?;
    let (files, user) = of_sandbox(backend, &target, user).await?;
    job.run(ctx, files, user, true).await
}

/// The files of a running sandbox, and the user whose access applies: the image's unless given.
async fn of_sandbox(
    backend: Backend,
    target: &str,
    user: Option<String>,
) -> Result<(SandboxFiles, Option<String>)> {
    let id = resolve::sandbox(&backend, target).await?;
    let sandbox: Sandbox = backend.get(&format!("/v1/sandboxes/{id}")).await?;
    if sandbox.state == SandboxStatus::Dead {
        let hint = format!("`harvest sandbox start {id}` starts it with its disk");
        bail!(Advice::new(format!("{id} is not running"), hint));
    }
    let user = user.or(Some(sandbox.user));
    Ok((SandboxFiles::new(backend, format!("/v1/sandboxes/{id}/files"), user.clone()), user))
}

#[derive(Debug, PartialEq, Eq)]
enum CopyJob {
    In { from: PathBuf, to: String },
    Out { from: String, to: PathBuf },
}

impl CopyJob {
    /// Parses both sides; returns the session or sandbox and the job.
    fn parse(from: &str, to: &str) -> Result<(String, Self)> {
        let sides = (CopySide::parse(from), CopySide::parse(to));
        for side in [&sides.0, &sides.1] {
            if let CopySide::Sandbox { sandbox, path } = side
                && sandbox.is_empty()
            {
                let hint = format!(
                    "write it as `SESSION:{path}` or `SANDBOX:{path}`, or `-:{path}` for the newest"
                );
                bail!(Advice::usage(format!("`:{path}` names no session and no sandbox"), hint));
            }
        }
        Ok(match sides {
            (CopySide::Local(from), CopySide::Sandbox { sandbox, path }) => {
                (sandbox, Self::In { from, to: path })
            }
            (CopySide::Sandbox { sandbox, path }, CopySide::Local(to)) => {
                (sandbox, Self::Out { from: path, to })
            }
            (CopySide::Sandbox { .. }, CopySide::Sandbox { .. }) => {
                bail!(Advice::new(
                    "both sides are in a sandbox",
                    "copy to this machine first, then into the other sandbox"
                ))
            }
            (CopySide::Local(_), CopySide::Local(_)) => {
                bail!(Advice::new(
                    "neither side is in a sandbox",
                    "write one side as SESSION:/path or SANDBOX:/path"
                ))
            }
        })
    }

    async fn run(
        self,
        ctx: &Invocation,
        mut files: SandboxFiles,
        user: Option<String>,
        recursive: bool,
    ) -> Result<u8> {
        let failure = self.failure();
        let copied =
            tokio::task::spawn_blocking(move || self.copy(&mut files, user.as_deref(), recursive));
        // A copy to standard output prints no report.
        match copied.await?.context(failure)? {
            Some(copied) => copy::report(ctx, copied),
            None => Ok(0),
        }
    }

    /// The message of a failed copy.
    fn failure(&self) -> String {
        let shown = |path: &Path, stream: &str| match is_stream(path) {
            true => stream.to_owned(),
            false => path.display().to_string(),
        };
        match self {
            Self::In { from, to } => {
                format!("cannot copy {} to {to} in the sandbox", shown(from, "standard input"))
            }
            Self::Out { from, to } => {
                format!("cannot copy {from} from the sandbox to {}", shown(to, "standard output"))
            }
        }
    }

    fn copy(
        self,
        remote: &mut SandboxFiles,
        user: Option<&str>,
        recursive: bool,
    ) -> Result<Option<CopiedTree>> {
        match self {
            Self::In { from, to } if is_stream(&from) => {
                let mut stdin = CountingStdin { bytes: 0 };
                remote.write(&to, 0o644, user, &mut stdin)?;
                Ok(Some(CopiedTree { files: 1, bytes: stdin.bytes, ..CopiedTree::default() }))
            }
            Self::In { from, to } => {
                let is_folder = std::fs::symlink_metadata(&from)
                    .with_context(|| format!("cannot read {}", from.display()))?
                    .is_dir();
                require_recursive(is_folder, recursive, &from.display().to_string())?;
                copy::into_sandbox(remote, &from, to, user).map(Some)
            }
            Self::Out { from, to } if is_stream(&to) => {
                remote.read(&from, &mut Stdout)?;
                Ok(None)
            }
            Self::Out { from, to } => {
                require_recursive(remote.stat(&from)?.kind == FileKind::Folder, recursive, &from)?;
                copy::out_of_sandbox(remote, &from, to).map(Some)
            }
        }
    }
}

/// Whether the local side is standard input or output.
fn is_stream(path: &Path) -> bool {
    path.as_os_str() == "-"
}

fn require_recursive(is_folder: bool, recursive: bool, path: &str) -> Result<()> {
    match is_folder && !recursive {
        true => bail!(Advice::new(format!("{path} is a folder"), "`harvest cp -r` copies folders")),
        false => Ok(()),
    }
}

/// Standard input with a byte counter.
struct CountingStdin {
    bytes: u64,
}

impl std::io::Read for CountingStdin {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let count = std::io::stdin().read(buffer)?;
        self.bytes += count as u64;
        Ok(count)
    }
}

/// Standard output as a writer that keeps [`write_bytes`]' error.
struct Stdout;

impl std::io::Write for Stdout {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        write_bytes(bytes).map_err(std::io::Error::other)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(from: &str, to: &str) -> Option<(String, CopyJob)> {
        CopyJob::parse(from, to).ok()
    }

    #[test]
    fn copy_needs_one_local_and_one_sandbox_side() {
        let out = CopyJob::Out { from: "/a".into(), to: ".".into() };
        assert_eq!(of("ses_4:/a", "."), Some(("ses_4".into(), out)));
        assert_eq!(
            of("-", "-:/a"),
            Some(("-".into(), CopyJob::In { from: "-".into(), to: "/a".into() }))
        );
        assert_eq!(
            of("4k:/a", "-"),
            Some(("4k".into(), CopyJob::Out { from: "/a".into(), to: "-".into() }))
        );
        assert_eq!((of("a", "b"), of("x:/a", "y:/b"), of("-", "-")), (None, None, None));
        assert_eq!((of("f", ":/a"), of(":/a", "f")), (None, None));
    }
}
