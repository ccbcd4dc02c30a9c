//! The check a repository declares: `.harvest/check.sh`, run as the agent's user.

use std::time::Duration;

use harvest_proto::{api::Evidence, bridge::Exit};

use crate::{
    bridge::{Bridge, BridgeError},
    checkout,
    wiring::now,
};

/// Where a repository declares its check.
pub(crate) const CHECK: &str = ".harvest/check.sh";

const RUN: &str = "if [ -x .harvest/check.sh ]; then exec ./.harvest/check.sh; else exec sh .harvest/check.sh; fi";

/// Runs the declared check on what is checked out. Where none is declared, the evidence says so and
/// does not claim to have passed.
pub(crate) async fn run(
    bridge: &Bridge,
    folder: &str,
    commit: String,
    limit: Duration,
) -> Result<Evidence, BridgeError> {
    let declared =
        bridge.run_command(checkout::command(&["test", "-f", CHECK], folder, 60_000), 0).await?;
    if !declared.ok() {
        return Ok(Evidence {
            repository: None,
            commit,
            check: "none declared".to_owned(),
            passed: false,
            // What a shell says of a command that is not there.
            exit: Exit::Code(127),
            millis: 0,
            tail: format!("the repository has no {CHECK}"),
            at: now(),
        });
    }
    let millis = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX);
    let output =
        bridge.run_command(checkout::command(&["sh", "-c", RUN], folder, millis), 0).await?;
    Ok(Evidence {
        repository: None,
        commit,
        check: CHECK.to_owned(),
        passed: output.ok(),
        exit: output.exit,
        millis: output.millis,
        tail: output.tail(),
        at: now(),
    })
}
