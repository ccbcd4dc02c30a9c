//! Checks of request bodies beyond their types: strings that end up on a command line, in an
//! environment or in a commit, and numeric limits.

use axum::http::StatusCode;
use std::{collections::BTreeMap, ops::RangeInclusive};

use harvest_proto::{
    api::{CreateSandbox, ExecRequest, SandboxLimits},
    bridge::Author,
};

use crate::problem::ApiError;

// Longer than any real name or email address.
const MAX_AUTHOR_CHARS: usize = 200;

pub(crate) fn exec(request: &ExecRequest) -> Result<(), ApiError> {
    let has_program = request.argv.first().is_some_and(|program| !program.is_empty());
    require(request.code.is_some() || has_program, "`argv` is empty")?;
    texts(request.argv.iter().chain(&request.cwd).chain(&request.user))?;
    env(&request.env)?;
    request.sandbox.as_deref().map_or(Ok(()), sandbox)
}

pub(crate) fn sandbox(request: &CreateSandbox) -> Result<(), ApiError> {
    texts(request.image.iter().chain(request.volumes.iter().map(|volume| &volume.inside)))?;
    env(&request.env)?;
    limits(&request.limits)
}

pub(crate) fn fork_count(count: Option<u16>) -> Result<u16, ApiError> {
    match count.unwrap_or(1) {
        count @ 1..=100 => Ok(count),
        count => Err(invalid(&format!("`count` must be 1 to 100, not {count}"))),
    }
}

/// The texts of a pull request, in characters; forges have these limits too.
pub(crate) fn pull_request(title: Option<&str>, body: Option<&str>) -> Result<(), ApiError> {
    let title_fits = title.is_none_or(|title| {
        !title.trim().is_empty()
            && !title.contains(char::is_control)
            && title.chars().count() <= 256
    });
    require(title_fits, "`title` must have 1 to 256 characters on one line")?;
    let body_fits = body.is_none_or(|body| body.chars().count() <= 40_000);
    require(body_fits, "`body` has more than 40000 characters")
}

fn limits(limits: &SandboxLimits) -> Result<(), ApiError> {
    const PEBIBYTE: u64 = 1 << 50;
    let within = |name: &str, given: Option<u64>, range: RangeInclusive<u64>| match given {
        Some(given) if !range.contains(&given) => {
            let (from, to) = range.into_inner();
            Err(invalid(&format!("`{name}` must be {from} to {to}, not {given}")))
        }
        _ => Ok(()),
    };
    within("memory_bytes", limits.memory_bytes, 1 << 20..=PEBIBYTE)?;
    // The kernel accounts in periods of 100 ms with a quota of at least 1 ms each.
    within("cpu_millis_per_second", limits.cpu_millis_per_second.map(u64::from), 10..=4_096_000)?;
    within("pids", limits.pids.map(u64::from), 1..=4_194_304)?;
    within("writable_bytes", limits.writable_bytes, 4096..=PEBIBYTE)?;
    within("lifetime_secs", limits.lifetime_secs, 1..=315_360_000)
}

fn texts<'a>(mut texts: impl Iterator<Item = &'a String>) -> Result<(), ApiError> {
    require(!texts.any(|text| text.contains('\0')), "the request contains a NUL character")
}

fn env(env: &BTreeMap<String, String>) -> Result<(), ApiError> {
    texts(env.values())?;
    let valid = !env.keys().any(|name| name.is_empty() || name.contains(['=', '\0']));
    require(valid, "the name of an environment variable must not be empty or contain `=`")
}

/// An author usable in a commit: git ends a name at `<` and a header at a newline.
pub(crate) fn author(author: Option<&Author>) -> Result<(), ApiError> {
    let Some(author) = author else { return Ok(()) };
    let is_valid = |text: &str| {
        (1..=MAX_AUTHOR_CHARS).contains(&text.trim().chars().count())
            && !text.contains(|letter: char| letter.is_control() || letter == '<' || letter == '>')
    };
    require(
        is_valid(&author.name) && is_valid(&author.email),
        "an author's name and email must be 1 to 200 characters on one line, without `<` and `>`",
    )
}

pub(crate) fn secret(value: &str) -> Result<(), ApiError> {
    require(!value.is_empty(), "the secret is empty")
        .map_err(|error| error.hint("to remove a secret, delete it"))
}

fn require(valid: bool, detail: &str) -> Result<(), ApiError> {
    if valid { Ok(()) } else { Err(invalid(detail)) }
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
    fn invalid_commands_are_rejected() {
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
    fn limits_out_of_range_are_rejected() {
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
        assert!(
            fork_count(Some(0)).is_err()
                && fork_count(Some(101)).is_err()
                && fork_count(None).is_ok()
        );
    }

    #[test]
    fn author_cannot_inject_commit_headers() {
        let named = |name: &str| author(Some(&Author { name: name.into(), email: "a@b".into() }));
        assert!(named("Ada Lovelace").is_ok() && named("Åsa").is_ok() && author(None).is_ok());
        for bad in ["", "  ", "a\nb", "a <x@y>", "\u{1b}[31m", &"x".repeat(201)] {
            assert!(named(bad).is_err(), "{bad:?}");
        }
    }
}
