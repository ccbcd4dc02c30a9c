//! Runs a repository's `.harvest/check.sh` as the agent's user.

use std::time::Duration;

use harvest_proto::{
    RepositoryName,
    api::{CheckOutcome, Evidence},
    bridge::Exit,
};

use crate::{
    bridge::{Bridge, BridgeError},
    checkout,
    timeouts::millis,
    wall_clock::now,
};

pub(crate) const CHECK: &str = ".harvest/check.sh";

const RUN: &str = "if [ -x .harvest/check.sh ]; then exec ./.harvest/check.sh; else exec sh .harvest/check.sh; fi";

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
