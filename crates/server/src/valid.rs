//! What a body may say beyond its types: texts that end up on a command line, in an environment or in a
//! commit. Refused here, because further in there is nobody left to answer.

use axum::http::StatusCode;
use std::{collections::BTreeMap, ops::RangeInclusive};

use harvest_proto::{
    api::{
        ExecRequest,
        machines::{CreateSandbox, RunCommand, SandboxLimits},
    },
    bridge::Author,
};

use crate::problem::ApiError;

/// Longer than any name or address there is.
const MAX_AUTHOR_CHARS: usize = 200;

/// A command that the kernel can be given at all.
pub(crate) fn exec(request: &ExecRequest) -> Result<(), ApiError> {
    if request.argv.first().is_none_or(String::is_empty) {
        return Err(invalid("`argv` names no command"));
    }
    texts(request.argv.iter().chain(&request.cwd).chain(&request.user))?;
    env(&request.env)
}

/// The same for a command in a sandbox of one's own; with code it needs no program.
pub(crate) fn run(request: &RunCommand) -> Result<(), ApiError> {
    texts(request.argv.iter().chain(&request.cwd).chain(&request.user))?;
    env(&request.env)
}

/// A sandbox that a host can be asked for at all.
pub(crate) fn sandbox(request: &CreateSandbox) -> Result<(), ApiError> {
    texts(request.image.iter().chain(request.volumes.iter().map(|volume| &volume.inside)))?;
    env(&request.env)?;
    limits(&request.limits)
}

/// How many forks a sandbox may get at once.
pub(crate) fn forks(asked: Option<u16>) -> Result<u16, ApiError> {
    match asked.unwrap_or(1) {
        count @ 1..=100 => Ok(count),
        count => Err(invalid(&format!("`count` is 1 to 100, not {count}"))),
    }
}

fn limits(limits: &SandboxLimits) -> Result<(), ApiError> {
    const PEBIBYTE: u64 = 1 << 50;
    let within = |name: &str, given: Option<u64>, range: RangeInclusive<u64>| match given {
        Some(given) if !range.contains(&given) => {
            let (from, to) = range.into_inner();
            Err(invalid(&format!("`{name}` is {from} to {to}, not {given}")))
        }
        _ => Ok(()),
    };
    within("memory_bytes", limits.memory_bytes, 1 << 20..=PEBIBYTE)?;
    // The kernel counts in tenths of a second and gives no less than a millisecond of each.
    within("cpu_millis_per_second", limits.cpu_millis_per_second.map(u64::from), 10..=4_096_000)?;
    within("pids", limits.pids.map(u64::from), 1..=4_194_304)?;
    within("writable_bytes", limits.writable_bytes, 4096..=PEBIBYTE)?;
    within("lifetime_secs", limits.lifetime_secs, 1..=315_360_000)
}

fn texts<'a>(mut texts: impl Iterator<Item = &'a String>) -> Result<(), ApiError> {
    match texts.any(|text| text.contains('\0')) {
        true => Err(invalid("the request holds a zero byte, which ends a text for the kernel")),
        false => Ok(()),
    }
}

fn env(env: &BTreeMap<String, String>) -> Result<(), ApiError> {
    texts(env.values())?;
    match env.keys().any(|name| name.is_empty() || name.contains(['=', '\0'])) {
        true => Err(invalid("a variable's name is not empty and has no `=` in it")),
        false => Ok(()),
    }
}

/// Somebody a commit can be by: git ends a name at `<` and a header at a line's end.
pub(crate) fn author(author: Option<&Author>) -> Result<(), ApiError> {
    let Some(author) = author else { return Ok(()) };
    let sound = |text: &str| {
        (1..=MAX_AUTHOR_CHARS).contains(&text.trim().chars().count())
            && !text.contains(|letter: char| letter.is_control() || letter == '<' || letter == '>')
    };
    match sound(&author.name) && sound(&author.email) {
        true => Ok(()),
        false => Err(invalid(
            "an author's name and email are 1 to 200 characters on one line, without `<` and `>`",
        )),
    }
}

/// A secret that holds something.
pub(crate) fn secret(value: &str) -> Result<(), ApiError> {
    match value.is_empty() {
        true => Err(invalid("the secret is empty").hint("delete it instead")),
        false => Ok(()),
    }
}

fn invalid(detail: &str) -> ApiError {
    ApiError::new(StatusCode::UNPROCESSABLE_ENTITY, "invalid_body", detail)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command(argv: &[&str]) -> ExecRequest {
        ExecRequest {
            argv: argv.iter().map(|text| (*text).to_owned()).collect(),
            ..ExecRequest::default()
        }
    }

    #[test]
    fn a_command_the_kernel_cannot_be_given_is_refused() {
        assert!(exec(&command(&["echo", ""])).is_ok());
        for bad in [command(&[]), command(&[""]), command(&["a\0b"]), command(&["a", "\0"])] {
            assert!(exec(&bad).is_err(), "{bad:?}");
        }
        for name in ["", "A=B", "A\0"] {
            let env = [(name.to_owned(), "x".to_owned())].into();
            assert!(exec(&ExecRequest { env, ..command(&["env"]) }).is_err(), "{name:?}");
        }
        let cwd = Some("/a\0".to_owned());
        assert!(exec(&ExecRequest { cwd, ..command(&["pwd"]) }).is_err());
    }

    #[test]
    fn a_limit_no_kernel_takes_is_refused() {
        let with = |limits| sandbox(&CreateSandbox { limits, ..CreateSandbox::default() });
        assert!(
            with(SandboxLimits { memory_bytes: Some(24 << 20), ..SandboxLimits::default() })
                .is_ok()
        );
        for bad in [
            SandboxLimits { memory_bytes: Some(0), ..SandboxLimits::default() },
            SandboxLimits { cpu_millis_per_second: Some(0), ..SandboxLimits::default() },
            SandboxLimits { pids: Some(u32::MAX), ..SandboxLimits::default() },
            SandboxLimits { writable_bytes: Some(u64::MAX), ..SandboxLimits::default() },
            SandboxLimits { lifetime_secs: Some(0), ..SandboxLimits::default() },
        ] {
            assert!(with(bad).is_err(), "{bad:?}");
        }
        assert!(forks(Some(0)).is_err() && forks(Some(101)).is_err() && forks(None).is_ok());
    }

    #[test]
    fn an_author_cannot_write_more_of_a_commit_than_a_name() {
        let named = |name: &str| author(Some(&Author { name: name.into(), email: "a@b".into() }));
        assert!(named("Ada Lovelace").is_ok() && named("Åsa").is_ok() && author(None).is_ok());
        for bad in ["", "  ", "a\nb", "a <x@y>", "\u{1b}[31m", &"x".repeat(201)] {
            assert!(named(bad).is_err(), "{bad:?}");
        }
    }
}
