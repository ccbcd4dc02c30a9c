//! The process that runs the git commands of one request: the same binary in the role `git`, with
//! the checkout as its working directory.
//!
//! A process of the agent's user, not pid 1, because a job writes below the agent's home, where
//! root would follow the agent's links, and reads as many file names as the agent has created.

use std::{path::PathBuf, process::ExitCode};

use harvest_proto::bridge::{GitQuery, Reply};
use serde::{Deserialize, Serialize};

use super::{
    carry::{self, CarryJob},
    trees::{CheckoutTrees, JobError},
};

/// The role's name on the command line.
pub(crate) const ROLE: &str = "git";

/// The exit code when objects of a tree are missing.
pub(super) const OBJECTS_MISSING: u8 = 3;

// Below the agent's home, outside the repository: no git command of the agent can delete the
// objects, and they are never pushed.
const STORE: &str = ".local/state/harvest/turns";

/// The argument after the name of the checkout.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Job {
    /// Prints a [`Reply::SavedTree`] as the last line.
    Save { against: Option<String> },
    /// Prints the output of the query.
    Query(GitQuery),
    /// Reads a pack from stdin.
    Unpack,
    /// Prints a report of its own.
    Carry(CarryJob),
}

/// The role's entry point.
pub(crate) fn main(checkout: Option<&str>, job: Option<&str>) -> ExitCode {
    match run(checkout.unwrap_or_default(), job.unwrap_or_default()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(JobError::ObjectsMissing) => ExitCode::from(OBJECTS_MISSING),
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run(checkout: &str, job: &str) -> Result<(), JobError> {
    let job = serde_json::from_str(job).map_err(|error| JobError::io("read the job", error))?;
    let home = std::env::var_os("HOME").map_or_else(|| "/home/harvest".into(), PathBuf::from);
    let folder = std::env::current_dir()
        .map_err(|error| JobError::io("find the working directory", error))?;
    if let Job::Carry(job) = job {
        carry::run_job(&folder, job);
        return Ok(());
    }
    let trees = CheckoutTrees::open(&folder, home.join(STORE).join(checkout))?;
    let prefix = |prefixed: bool| if prefixed { format!("{checkout}/") } else { String::new() };
    match job {
        Job::Save { against } => {
            let (tree, stat) = trees.save(against.as_deref())?;
            let line = serde_json::to_string(&Reply::SavedTree { tree, stat });
            // On a line of its own, whatever the repository's filters have printed.
            println!("\n{}", line.map_err(|error| JobError::io("print the tree", error))?);
            Ok(())
        }
        Job::Query(GitQuery::Diff { base, prefixed }) => trees.diff(&base, &prefix(prefixed)),
        Job::Query(GitQuery::Compare { from, to, format, prefixed }) => {
            trees.compare([&from, &to], format, &prefix(prefixed))
        }
        Job::Query(GitQuery::Bundle { branch, base }) => trees.bundle(&branch, base.as_deref()),
        Job::Query(GitQuery::Pack { tree, base }) => trees.pack(&tree, base.as_deref()),
        Job::Unpack => trees.unpack(),
        Job::Carry(_) => Ok(()),
    }
}
