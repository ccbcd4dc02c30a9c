//! `harvest cp`: files and folders between this machine and a session's sandbox, or a sandbox of one's own.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use harvest_engine::guest::{CopiedTree, Far};
use harvest_proto::bridge::FileKind;

use crate::{
    Invocation,
    cli::{Cp, Side},
    client::Client,
    copy,
    desk::Desk,
    far::SessionFiles,
    printer::{Advice, write_bytes},
    resolve,
};

pub(crate) async fn run(here: &Invocation, args: Cp) -> Result<u8> {
    let (place, job) = job(&args)?;
    if place.starts_with("sbx_") {
        let desk = Desk::find(&here.config)?;
        super::sandbox::copy::run(here, &desk, &args.from, &args.to, args.user).await?;
        return Ok(0);
    }
    let client = Client::find(&here.config)?;
    let session = resolve::session(&client, &place).await?;
    let words = format!("cannot copy {} to {}", args.from, args.to);
    let mut files = SessionFiles::new(client, session);
    let (user, recursive) = (args.user, args.recursive);
    let copied = tokio::task::spawn_blocking(move || job.run(&mut files, user.as_deref(), recursive)).await?;
    // Nothing is to be told of what is on standard output.
    if let Some(copied) = copied.context(words)? {
        copy::tell(here, copied)?;
    }
    Ok(0)
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
fn job(args: &Cp) -> Result<(String, Job)> {
    let stream = |side: &str| side == "-";
    Ok(match (Side::parse(&args.from), Side::parse(&args.to)) {
        (Side::Here(_), Side::Inside { sandbox, path }) if stream(&args.from) => {
            (sandbox, Job::InFromStdin { to: path })
        }
        (Side::Here(from), Side::Inside { sandbox, path }) => (sandbox, Job::In { from, to: path }),
        (Side::Inside { sandbox, path }, Side::Here(_)) if stream(&args.to) => {
            (sandbox, Job::OutToStdout { from: path })
        }
        (Side::Inside { sandbox, path }, Side::Here(to)) => (sandbox, Job::Out { from: path, to }),
        (Side::Inside { .. }, Side::Inside { .. }) => {
            bail!(Advice::new("one side of a copy is on this machine", "copy out first, then in"))
        }
        (Side::Here(_), Side::Here(_)) => {
            bail!(Advice::new("neither side is in a sandbox", "write that side as SESSION:/path"))
        }
    })
}

impl Job {
    fn run(self, far: &mut SessionFiles, user: Option<&str>, recursive: bool) -> Result<Option<CopiedTree>> {
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
        true => bail!(Advice::new(format!("{path} is a folder"), "`harvest cp -r` copies all that is in it")),
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
        job(&Cp { from: from.into(), to: to.into(), recursive: false, user: None }).ok()
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
