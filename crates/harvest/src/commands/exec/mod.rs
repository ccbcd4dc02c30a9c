//! `harvest exec`: a command in a fresh sandbox, in a sandbox of one's own or in a session's; its output as
//! it is, as `ssh` would give it, and its own exit code.

mod ends;
mod machine;
mod outcome;
mod session;

use std::collections::BTreeMap;

use anyhow::{Result, bail};

use crate::{Invocation, cli::Exec, printer::Advice};
use outcome::{Outcome, Sink};

pub(crate) async fn run(here: &Invocation, args: Exec) -> Result<u8> {
    let sink = Sink::new(here.print.json);
    let place = args.place.clone();
    let ran = match place.as_deref() {
        Some(place) if !place.starts_with("sbx_") => session::run(here, args, place, sink).await,
        _ => machine::run(here, args, sink).await,
    };
    match ran {
        // Who asked for a document gets one, also of a failure that is ours.
        Err(error) if here.print.json && !crate::printer::reader_left(&error) => {
            here.print.error(&error);
            Sink::new(true).finish(here.print, &Outcome::ours(&error), None)
        }
        other => other,
    }
}

/// The exit code that says how a command ended.
pub(crate) fn exit_code(exit: harvest_proto::bridge::Exit) -> u8 {
    Outcome::exited(exit, 0).code
}

/// The variables of `-e`: `NAME=VALUE`, or `NAME` for this process's own.
pub(crate) fn variables(given: &[String]) -> Result<BTreeMap<String, String>> {
    let mut env = BTreeMap::new();
    for variable in given {
        match variable.split_once('=') {
            Some((name, value)) if !name.is_empty() => {
                env.insert(name.to_owned(), value.to_owned());
            }
            // As `docker run -e` does: what is not set here is not set there.
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
