//! `harvest cp`: files and folders between this machine and a session's sandbox, or a sandbox of one's own.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use harvest_engine::guest::{CopiedTree, Far};
use harvest_proto::{
    api::machines::{Sandbox, SandboxStatus},
    bridge::FileKind,
};

use crate::{
    Invocation,
    cli::{Cp, Side},
    client::Client,
    copy,
    desk::Desk,
    far::Files,
    printer::{Advice, write_bytes},
    resolve,
};

pub(crate) async fn run(here: &Invocation, args: Cp) -> Result<u8> {
    let (place, job) = job(&args.from, &args.to)?;
    if place.starts_with("sbx_") {
        let (files, user) = of_sandbox(Desk::find(&here.config)?, &place, args.user).await?;
        job.carry_out(here, files, user, args.recursive).await?;
        return Ok(0);
    }
    let client = Client::find(&here.config)?;
    let session = resolve::session(&client, &place).await?;
    job.carry_out(here, Files::of_session(client, &session), args.user, args.recursive).await?;
    Ok(0)
}

/// `harvest sandbox cp`, which copies folders without being told to.
pub(super) async fn in_sandbox(
    here: &Invocation,
    desk: Desk,
    from: String,
    to: String,
    user: Option<String>,
) -> Result<()> {
    let (place, job) = job(&from, &to)?;
    let (files, user) = of_sandbox(desk, &place, user).await?;
    job.carry_out(here, files, user, true).await
}

/// The files of a sandbox that runs, and whose those are to be that are put there: the image's user's unless
/// somebody says otherwise.
async fn of_sandbox(
    desk: Desk,
    place: &str,
    user: Option<String>,
) -> Result<(Files, Option<String>)> {
    let id = resolve::sandbox(&desk, place).await?;
    let sandbox: Sandbox = desk.get(&format!("/v1/sandboxes/{id}")).await?;
    if sandbox.state == SandboxStatus::Dead {
        let hint = format!("`harvest sandbox start {id}` starts it with the disk it left");
        bail!(Advice::new(format!("{id} does not run"), hint));
    }
    Ok((Files::of_sandbox(desk, &id), user.or(Some(sandbox.user))))
}

/// What is to be copied which way.
#[derive(Debug, PartialEq, Eq)]
enum Job {
    In { from: PathBuf, to: String },
    InFromStdin { to: String },
    Out { from: String, to: PathBuf },
    OutToStdout { from: String },
}

/// The session or sandbox meant, and what to do with it.
fn job(from: &str, to: &str) -> Result<(String, Job)> {
    let stream = |side: &str| side == "-";
    Ok(match (Side::parse(from), Side::parse(to)) {
        (Side::Here(_), Side::Inside { sandbox, path }) if stream(from) => {
            (sandbox, Job::InFromStdin { to: path })
        }
        (Side::Here(from), Side::Inside { sandbox, path }) => (sandbox, Job::In { from, to: path }),
        (Side::Inside { sandbox, path }, Side::Here(_)) if stream(to) => {
            (sandbox, Job::OutToStdout { from: path })
        }
        (Side::Inside { sandbox, path }, Side::Here(to)) => (sandbox, Job::Out { from: path, to }),
        (Side::Inside { .. }, Side::Inside { .. }) => {
            bail!(Advice::new("one side of a copy is on this machine", "copy out first, then in"))
        }
        (Side::Here(_), Side::Here(_)) => {
            bail!(Advice::new(
                "neither side is in a sandbox",
                "write that side as SESSION:/path or SANDBOX:/path"
            ))
        }
    })
}

impl Job {
    async fn carry_out(
        self,
        here: &Invocation,
        mut files: Files,
        user: Option<String>,
        recursive: bool,
    ) -> Result<()> {
        let words = self.words();
        let copied =
            tokio::task::spawn_blocking(move || self.run(&mut files, user.as_deref(), recursive));
        // Nothing is to be told of what is on standard output.
        match copied.await?.context(words)? {
            Some(copied) => copy::tell(here, copied),
            None => Ok(()),
        }
    }

    /// What was not done, should it fail.
    fn words(&self) -> String {
        match self {
            Self::In { from, to } => {
                format!("cannot copy {} to {to} in the sandbox", from.display())
            }
            Self::InFromStdin { to } => {
                format!("cannot copy standard input to {to} in the sandbox")
            }
            Self::Out { from, to } => {
                format!("cannot copy {from} of the sandbox to {}", to.display())
            }
            Self::OutToStdout { from } => {
                format!("cannot copy {from} of the sandbox to standard output")
            }
        }
    }

    fn run(
        self,
        far: &mut Files,
        user: Option<&str>,
        recursive: bool,
    ) -> Result<Option<CopiedTree>> {
        let explain = |error| error;
        match self {
            Self::In { from, to } => {
                let is_folder = std::fs::symlink_metadata(&from)
                    .with_context(|| format!("cannot read {}", from.display()))?
                    .is_dir();
                allowed(is_folder, recursive, &from.display().to_string())?;
                copy::into_sandbox(far, &from, to, user, explain).map(Some)
            }
            Self::Out { from, to } => {
                allowed(far.stat(&from)?.kind == FileKind::Folder, recursive, &from)?;
                copy::out_of_sandbox(far, &from, to, explain).map(Some)
            }
            Self::InFromStdin { to } => {
                let mut counted = Counted { bytes: 0 };
                far.write(&to, 0o644, user, &mut counted)?;
                Ok(Some(CopiedTree { files: 1, bytes: counted.bytes, skipped: 0 }))
            }
            Self::OutToStdout { from } => {
                far.read(&from, &mut Stdout)?;
                Ok(None)
            }
        }
    }
}

fn allowed(is_folder: bool, recursive: bool, path: &str) -> Result<()> {
    match is_folder && !recursive {
        true => bail!(Advice::new(
            format!("{path} is a folder"),
            "`harvest cp -r` copies all that is in it"
        )),
        false => Ok(()),
    }
}

/// Standard input, and how much it was.
struct Counted {
    bytes: u64,
}

impl std::io::Read for Counted {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let count = std::io::stdin().read(buffer)?;
        self.bytes += count as u64;
        Ok(count)
    }
}

/// Standard output, whose reader may leave early.
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

    fn of(from: &str, to: &str) -> Option<(String, Job)> {
        job(from, to).ok()
    }

    #[test]
    fn a_copy_has_one_side_here_and_the_other_in_a_sandbox() {
        let out = Job::Out { from: "/a".into(), to: ".".into() };
        assert_eq!(of("ses_4:/a", "."), Some(("ses_4".into(), out)));
        assert_eq!(of("-", ":/a"), Some(("-".into(), Job::InFromStdin { to: "/a".into() })));
        assert_eq!(of("4k:/a", "-"), Some(("4k".into(), Job::OutToStdout { from: "/a".into() })));
        assert_eq!((of("a", "b"), of("x:/a", "y:/b"), of("-", "-")), (None, None, None));
    }
}
