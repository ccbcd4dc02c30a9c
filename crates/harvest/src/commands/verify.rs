//! `harvest verify`: runs a repository's check on a commit, a branch, a pull request or what a
//! session has pushed. The exit code is the result: 0 passed, 1 failed, 2 could not run.

use anyhow::{Context, Result, bail};
use harvest_proto::{
    RepositoryRef,
    api::{CheckOutcome, Evidence, Page, Verification, VerificationStatus, VerifyRepository},
};
use reqwest::Method;

use crate::{
    Invocation,
    cli::VerifyArgs,
    client::Client,
    follow::Lines,
    printer::{Advice, human_millis},
    render::{describe_exit, short_commit},
    resolve,
    sanitize::sanitize,
};

const PASSED: u8 = 0;
const FAILED: u8 = 1;
/// Also the exit code of wrong usage.
pub(crate) const NOT_RUN: u8 = 2;

/// What the argument names.
#[derive(Debug, PartialEq, Eq)]
enum Target {
    Session(String),
    Repository(RepositoryRef, VerifyRepository),
}

pub(crate) async fn run(ctx: &Invocation, args: &VerifyArgs) -> Result<u8> {
    let target = parse(&args.target)?;
    let client = Client::find(&ctx.config)?;
    let started = match target {
        Target::Session(typed) => {
            let id = resolve::session(&client, &typed).await?;
            let request = client.request(Method::POST, &format!("/v1/sessions/{id}/verify"));
            let started: Page<Verification> = client.send(request).await?.json().await?;
            started.items
        }
        Target::Repository(name, order) => {
            let name = client.repository(&name).await?.name;
            vec![client.post(&format!("/v1/repositories/{name}/verify"), &order).await?]
        }
    };
    let mut code = PASSED;
    for one in started {
        let ended = tokio::select! {
            ended = follow(ctx, &client, &one) => ended?,
            _ = tokio::signal::ctrl_c() => {
                ctx.print.note("\nDetached; the server goes on with the check");
                let at = format!("/v1/repositories/{}/verifications/{}", one.repository, one.id);
                ctx.print.hint(format!("`harvest api GET {at}` shows it"));
                return Ok(NOT_RUN);
            }
        };
        ctx.print.result(&ended, text)?;
        code = code.max(exit_code(&ended));
    }
    Ok(code)
}

/// `ID`, `REPO`, `REPO@COMMIT` or `REPO#NUMBER`.
fn parse(target: &str) -> Result<Target> {
    let usage = || {
        Advice::usage(
            format!("`{target}` names no session, commit or pull request"),
            "give a session, OWNER/NAME@COMMIT, OWNER/NAME@BRANCH or OWNER/NAME#NUMBER",
        )
    };
    let Some(at) = target.find(['@', '#']) else {
        return match target.contains('/') {
            true => {
                let name = target.parse().map_err(|_| usage())?;
                Ok(Target::Repository(name, VerifyRepository::default()))
            }
            false => Ok(Target::Session(target.to_owned())),
        };
    };
    let (name, rest) = (&target[..at], &target[at + 1..]);
    let name = name.parse().map_err(|_| usage())?;
    let order = match target.as_bytes()[at] {
        b'#' => {
            let number = rest.parse().map_err(|_| usage())?;
            VerifyRepository { pull_request: Some(number), ..VerifyRepository::default() }
        }
        _ if rest.is_empty() => bail!(usage()),
        _ => VerifyRepository { revision: Some(rest.to_owned()), ..VerifyRepository::default() },
    };
    Ok(Target::Repository(name, order))
}

/// Reports the steps on stderr until the verification has ended.
async fn follow(ctx: &Invocation, client: &Client, started: &Verification) -> Result<Verification> {
    let (name, id) = (&started.repository, &started.id);
    ctx.print.note(format!("Checking {} of {name}", short_commit(&started.commit)));
    let path = format!("/v1/repositories/{name}/verifications/{id}");
    let answered = client.send(client.request(Method::GET, &format!("{path}?follow=true"))).await?;
    let (mut lines, mut last) = (Lines::new(answered), String::new());
    while let Some(now) = lines.json::<Verification>().await? {
        if now.status.has_ended() {
            return Ok(now);
        }
        if !now.step.is_empty() && now.step != last {
            ctx.print.note(format!("  {}", sanitize(&now.step)));
            last = now.step;
        }
    }
    let hint = format!("`harvest api GET {path}` shows whether it has ended");
    Err(Advice::new("the server stopped before the check ended", hint)).context("no result")
}

fn exit_code(ended: &Verification) -> u8 {
    match (ended.status, ended.evidence.as_ref().map(|evidence| evidence.outcome)) {
        (VerificationStatus::Done, Some(CheckOutcome::Passed)) => PASSED,
        (VerificationStatus::Done, Some(CheckOutcome::Failed)) => FAILED,
        _ => NOT_RUN,
    }
}

fn text(ended: &Verification) -> String {
    let of = match ended.pull_request {
        Some(number) => format!("#{number} ({})", ended.revision),
        None => ended.revision.clone(),
    };
    let mut lines = vec![("verified", format!("{} {of}", ended.repository))];
    lines.push(("commit", ended.commit.clone()));
    match (&ended.evidence, &ended.error) {
        (Some(evidence), _) => lines.extend(evidence_lines(evidence)),
        (None, error) => {
            let error = error.as_deref().unwrap_or("no reason is known");
            lines.push(("not run", error.to_owned()));
        }
    }
    lines
        .extend(ended.unpublished.clone().map(|why| ("not shown", format!("at the forge: {why}"))));
    let text: String = lines.iter().map(|(name, value)| format!("{name:<14}{value}\n")).collect();
    let failed = ended.evidence.as_ref().filter(|one| one.outcome == CheckOutcome::Failed);
    let tail = failed.map_or_else(String::new, |evidence| {
        evidence.tail.lines().map(|line| format!("  {line}\n")).collect()
    });
    sanitize(&(text + &tail))
}

/// Evidence as names and values.
pub(crate) fn evidence_lines(evidence: &Evidence) -> Vec<(&'static str, String)> {
    let Evidence { check, command, outcome, base, base_commit, changed, .. } = evidence;
    if *outcome == CheckOutcome::NoneDeclared {
        return vec![("evidence", format!("none: {}", evidence.tail))];
    }
    let (commit, exit) = (short_commit(&evidence.commit), describe_exit(evidence.exit));
    let time = human_millis(evidence.millis);
    let mut lines =
        vec![("evidence", format!("{check} on {commit}: {outcome} ({exit}) in {time}"))];
    if command != check {
        lines.push(("command", command.clone()));
    }
    if let Some(commit) = base_commit {
        let base = base.as_ref().map_or("the default branch", |base| base.as_str());
        lines.push(("declared by", format!("{base} at {}", short_commit(commit))));
    }
    if !changed.is_empty() {
        let others = evidence.changed_count.saturating_sub(changed.len() as u64);
        let others = if others > 0 { format!(" and {others} more") } else { String::new() };
        lines.push(("changes", format!("{}{others}", changed.join(", "))));
    }
    lines.extend(evidence.snapshot_id.as_ref().map(|id| ("disk", id.to_string())));
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_sessions_commits_and_pull_requests() {
        let order = |text: &str| match parse(text).unwrap() {
            Target::Repository(name, order) => (name.to_string(), order),
            Target::Session(typed) => panic!("session {typed}"),
        };
        let revision = |text: &str| VerifyRepository {
            revision: Some(text.to_owned()),
            ..VerifyRepository::default()
        };
        assert_eq!(order("acme/app@main"), ("acme/app".to_owned(), revision("main")));
        assert_eq!(order("app@a@b#3"), ("app".to_owned(), revision("a@b#3")));
        assert_eq!(order("acme/app"), ("acme/app".to_owned(), VerifyRepository::default()));
        assert_eq!(order("app#12").1.pull_request, Some(12));
        assert_eq!(parse("release").unwrap(), Target::Session("release".to_owned()));
        for wrong in ["app@", "app#x", "#1", "@main", "a/b/c"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }
}
