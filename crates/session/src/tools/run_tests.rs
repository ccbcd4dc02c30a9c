//! The tool that runs a checkout's tests: it finds out how, runs them in the agent's cgroup as the
//! agent's user, and returns what they printed last with the numbers in it. Not evidence: the agent
//! can change everything that runs here.

use harvest_gateway::ledger::ToolResult;
use harvest_proto::bridge::{Command, Exit};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    SessionTools, ToolError, arguments,
    definition::{Definition, Effect, text},
};
use crate::{checkout, error::SessionError, repositories::check, timeouts::millis};

pub(super) const DEFINITION: Definition = Definition {
    name: "run_tests",
    description: "Run the tests of the repository and return their result: .harvest/check.sh if \
                  there is one, otherwise those of npm, cargo, pytest, unittest or make",
    effect: Effect::Adds,
    arguments: &[],
    optional: &[("repository", || {
        text("The folder below /workspace [default: the session's first repository]")
    })],
};

pub(super) async fn call(tools: &SessionTools, given: Value) -> Result<ToolResult, ToolError> {
    #[derive(Deserialize)]
    struct Wanted {
        repository: Option<String>,
    }
    let Wanted { repository } = arguments(given)?;
    let record = tools.shared.store.session_get(&tools.session).await?;
    let folder = match repository {
        None => record.work_folder(),
        Some(name) => {
            let known = record
                .checkouts
                .iter()
                .find(|checkout| String::from(checkout.folder.clone()) == name);
            known.map(|checkout| checkout.folder.path()).ok_or_else(|| {
                ToolError::Refused(format!("there is no folder `{name}` below /workspace"))
            })?
        }
    };
    let bridge = tools.host()?.bridge(&tools.session).await?;
    let run = async |script: &str, limit| {
        let command = checkout::command(&["/bin/sh", "-c", script], &folder, limit);
        let ran = bridge.run_command(Command { with_agent: true, ..command }).await;
        ran.map_err(SessionError::from)
    };
    let runner = check::find_tests(&bridge, &folder, true).await.map_err(SessionError::from)?;
    let Some(runner) = runner else {
        return Err(ToolError::Refused(format!(
            "found no tests in {folder}; add an executable .harvest/check.sh that runs them"
        )));
    };
    // The agent is silent meanwhile, and its turn would fail before the tests do.
    let timeouts = &tools.shared.timeouts;
    let limit = millis(timeouts.check.min(timeouts.silence.mul_f32(0.9)));
    let output = run(&format!("{{ {runner}\n}} 2>&1"), limit).await?;
    let tail = output.tail();
    let counts = counts(&tail);
    let structured = json!({
        "command": runner,
        "passed": output.ok(),
        "exit": output.exit,
        "millis": output.millis,
        "tests_passed": counts.map(|counts| counts.0),
        "tests_failed": counts.map(|counts| counts.1),
        "output": tail,
    });
    let text = format!("$ {runner}\n{tail}\n{}", describe(output.exit));
    Ok(ToolResult { text, structured: Some(structured), failed: false })
}

fn describe(exit: Exit) -> String {
    match exit {
        Exit::Code(0) => "The tests passed".to_owned(),
        Exit::Code(code) => format!("The tests failed with exit code {code}"),
        Exit::Signal(signal) => format!("The tests were killed by signal {signal}"),
        Exit::Oom => "The tests exceeded the memory limit of the sandbox".to_owned(),
        Exit::Timeout => "The tests exceeded their time limit".to_owned(),
        Exit::Killed => "The tests were stopped".to_owned(),
    }
}

/// How many tests passed and failed, if a line says so as cargo, pytest, Jest, Vitest or Node do.
/// Cargo prints one line per test program.
fn counts(output: &str) -> Option<(u64, u64)> {
    let mut total: Option<(u64, u64)> = None;
    for line in output.lines() {
        let found = (number_before(line, "passed"), number_before(line, "failed"));
        let node = (number_after(line, "# pass "), number_after(line, "# fail "));
        let (passed, failed) = (found.0.or(node.0), found.1.or(node.1));
        if passed.is_some() || failed.is_some() {
            let sum = total.get_or_insert((0, 0));
            sum.0 += passed.unwrap_or(0);
            sum.1 += failed.unwrap_or(0);
        }
    }
    total
}

/// The number in `3 passed`.
fn number_before(line: &str, word: &str) -> Option<u64> {
    let words: Vec<&str> =
        line.split([' ', ',', ';', '|']).filter(|word| !word.is_empty()).collect();
    let at = words.iter().position(|one| *one == word)?;
    words.get(at.checked_sub(1)?)?.parse().ok()
}

fn number_after(line: &str, prefix: &str) -> Option<u64> {
    line.trim_start_matches('ℹ').trim_start().strip_prefix(prefix)?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_common_runners_are_read() {
        let cargo = "test result: ok. 5 passed; 0 failed; 1 ignored\n\
                     test result: FAILED. 2 passed; 1 failed; 0 ignored";
        assert_eq!(counts(cargo), Some((7, 1)));
        assert_eq!(counts("1 failed, 3 passed in 0.12s"), Some((3, 1)));
        assert_eq!(counts("Tests:       2 failed, 9 passed, 11 total"), Some((9, 2)));
        assert_eq!(counts("# tests 4\n# pass 3\n# fail 1"), Some((3, 1)));
        assert_eq!(counts("everything is fine, all passed"), None);
    }
}
