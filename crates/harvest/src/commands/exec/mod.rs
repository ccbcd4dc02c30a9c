//! `harvest exec`: runs a command in a fresh sandbox, a standalone sandbox or a session's sandbox.
//! Like `ssh`, it passes the output unchanged and returns the command's exit code.

mod head_tail;
mod outcome;
mod request;

use std::collections::BTreeMap;

use anyhow::{Result, bail};

use crate::{Invocation, cli::ExecArgs, printer::Advice};
use outcome::{CommandOutcome, OutputSink};
pub(crate) use request::signal_exit_code;

pub(crate) async fn run(ctx: &Invocation, args: ExecArgs) -> Result<u8> {
    let sink = OutputSink::new(ctx.print.json);
    match request::run(ctx, args, sink).await {
        // `--json` prints a document also for Harvest's own failures.
        Err(error) if ctx.print.json && !crate::printer::is_broken_pipe(&error) => {
            ctx.print.error(&error);
            OutputSink::new(true).finish(ctx.print, &CommandOutcome::internal_error(&error), None)
        }
        other => other,
    }
}

/// The exit code for how a command ended.
pub(crate) fn exit_code(exit: harvest_proto::bridge::Exit) -> u8 {
    CommandOutcome::exited(exit, 0).code
}

/// Parses `-e`: `NAME=VALUE`, or `NAME` for the value in this environment.
pub(crate) fn variables(args: &[String]) -> Result<BTreeMap<String, String>> {
    let mut env = BTreeMap::new();
    for variable in args {
        match variable.split_once('=') {
            Some((name, value)) if !name.is_empty() => {
                env.insert(name.to_owned(), value.to_owned());
            }
            // Like `docker run -e`: a variable that is not set is not passed.
            None if !variable.is_empty() => {
                env.extend(std::env::var(variable).ok().map(|value| (variable.clone(), value)));
            }
            _ => bail!(Advice::new(
                format!("`{variable}` is not a variable"),
                "write it as NAME=VALUE"
            )),
        }
    }
    Ok(env)
}
