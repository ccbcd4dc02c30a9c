//! Runs a repository's `.harvest/check.sh` as the agent's user.

use std::time::Duration;

use harvest_proto::{
    RepositoryName,
    api::{CheckOutcome, Evidence},
    bridge::{Command, Exit},
};

use crate::{
    bridge::{Bridge, BridgeError},
    checkout,
    ephemeral::EphemeralError,
    timeouts::millis,
    wall_clock::now,
};

pub(crate) const CHECK: &str = ".harvest/check.sh";

const RUN: &str = "if [ -x .harvest/check.sh ]; then exec ./.harvest/check.sh; else exec sh .harvest/check.sh; fi";

// Without write permission, a running shell cannot be made to read other lines, and the user who
// owns the folder can only put another file in its place.
const SEAL: &str = "test -f .harvest/check.sh || exit 0; chown 0:0 .harvest/check.sh && chmod a-w .harvest/check.sh";

/// Makes the check's script unchangeable for the code that it runs, which could otherwise rewrite
/// the rest of it and so its verdict. Only for sandboxes whose disk is not kept.
pub(crate) async fn seal(
    bridge: &Bridge,
    repository: &RepositoryName,
) -> Result<(), EphemeralError> {
    let folder = &repository.folder().path();
    let command = checkout::command(&["sh", "-c", SEAL], folder, 60_000);
    let sealed = bridge.run_command(Command { user: Some("root".to_owned()), ..command }).await?;
    match sealed.ok() {
        true => Ok(()),
        false => Err(EphemeralError::Other(format!("cannot protect {CHECK}: {}", sealed.tail()))),
    }
}

/// Runs the check on the only checkout of a sandbox. Without a check script, the evidence says so.
pub(crate) async fn run(
    bridge: &Bridge,
    repository: &RepositoryName,
    commit: String,
    limit: Duration,
) -> Result<Evidence, BridgeError> {
    let folder = &repository.folder().path();
    let declared = checkout::command(&["test", "-f", CHECK], folder, 60_000);
    let declared = bridge.run_command(declared).await?;
    let missing = Evidence {
        repository: repository.clone(),
        commit,
        check: CHECK.to_owned(),
        outcome: CheckOutcome::NoneDeclared,
        // The shell's exit code for a missing command.
        exit: Exit::Code(127),
        millis: 0,
        tail: format!("no {CHECK} in the repository"),
        at: now(),
    };
    if !declared.ok() {
        return Ok(missing);
    }
    let command = checkout::command(&["sh", "-c", RUN], folder, millis(limit));
    let output = bridge.run_command(command).await?;
    let outcome = if output.ok() { CheckOutcome::Passed } else { CheckOutcome::Failed };
    let (tail, millis) = (output.tail(), output.millis);
    Ok(Evidence { outcome, exit: output.exit, millis, tail, at: now(), ..missing })
}
