//! Why a boot phase failed: one line for people, the last lines of the failed command, and whether
//! another boot would fail in the same way.

use harvest_proto::{BranchName, RepositoryName, bridge::Exit, event::BootFailure};

use crate::{capture::describe, install::CONFIG_FILE};

/// The failure of a phase.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct PhaseError {
    pub(super) failure: BootFailure,
    pub(super) tail: Option<String>,
}

impl PhaseError {
    /// A failure that may not repeat itself.
    pub(super) fn transient(message: impl Into<String>) -> Self {
        Self::new(message.into(), false)
    }

    /// A failure that repeats itself.
    pub(super) fn permanent(message: impl Into<String>) -> Self {
        Self::new(message.into(), true)
    }

    fn new(message: String, permanent: bool) -> Self {
        Self { failure: BootFailure { message, permanent, start_over: false }, tail: None }
    }

    pub(super) fn with_tail(self, tail: String) -> Self {
        Self { tail: Some(tail).filter(|tail| !tail.is_empty()), ..self }
    }

    /// An agent that did not start; a program that the image lacks does not appear.
    pub(super) fn of_agent(permanent: bool) -> Self {
        Self::new("cannot start the agent".to_owned(), permanent)
    }

    /// A hook is the repository's own program: it fails again.
    pub(super) fn of_hook(script: &str, exit: Exit) -> Self {
        let how = match exit {
            Exit::Code(code) => format!("exit {code}"),
            other => describe(other).trim_start_matches("was ").to_owned(),
        };
        Self::new(format!("{script} failed ({how})"), true)
    }

    /// The repository's own file: it is broken again.
    pub(super) fn of_config(repository: &RepositoryName) -> Self {
        Self::new(format!("{CONFIG_FILE} of {repository} cannot be used"), true)
    }

    /// A build that cannot continue an earlier one.
    pub(super) fn start_over(why: &str) -> Self {
        let failure = BootFailure { message: why.to_owned(), permanent: false, start_over: true };
        Self { failure, tail: None }
    }

    /// A package manager that failed; the registry may recover.
    pub(super) fn of_install(message: String) -> Self {
        Self::new(message, false)
    }

    /// A failed clone or fetch. A missing branch or repository and a refused token stay as they
    /// are; the network may recover.
    pub(super) fn of_sync(
        repository: &RepositoryName,
        base: Option<&BranchName>,
        tail: String,
    ) -> Self {
        let says = |texts: &[&str]| texts.iter().any(|text| tail.contains(text));
        if let Some(base) = base
            && says(&MISSING_BRANCH)
        {
            let message = format!("branch {base} does not exist in {repository}");
            return Self::new(message, true).with_tail(LIST_BRANCHES.to_owned());
        }
        let message = format!("cannot clone or fetch {repository}");
        Self::new(message, says(&PERMANENT)).with_tail(tail)
    }
}

const LIST_BRANCHES: &str = "`git ls-remote --heads URL` lists the branches of a repository";

/// What git says of a branch that the remote does not have: on fetch, on clone, on checkout.
const MISSING_BRANCH: [&str; 3] =
    ["couldn't find remote ref", "not found in upstream", "is not a commit"];

/// What git says of an answer of the remote that does not change by itself.
const PERMANENT: [&str; 5] = [
    "couldn't find remote ref",
    "' not found",
    "returned error: 401",
    "returned error: 403",
    "is a checkout of ",
];

#[cfg(test)]
mod tests {
    use super::*;

    fn sync(base: Option<&str>, tail: &str) -> PhaseError {
        let base = base.map(|base| base.parse().unwrap());
        PhaseError::of_sync(&"acme/shop".parse().unwrap(), base.as_ref(), tail.to_owned())
    }

    #[test]
    fn missing_branch_is_named_and_permanent() {
        for tail in [
            "git fetch\nfatal: couldn't find remote ref refs/heads/nope\nexited with code 128",
            "fatal: Remote branch nope not found in upstream origin",
        ] {
            let PhaseError { failure, tail } = sync(Some("nope"), tail);
            assert_eq!(failure.message, "branch nope does not exist in acme/shop");
            assert!(failure.permanent && tail.unwrap().contains("ls-remote"));
        }
    }

    #[test]
    fn only_network_failures_are_transient() {
        let door = "http://git.harvest.internal/acme/shop.git";
        for (tail, permanent) in [
            (format!("fatal: repository '{door}/' not found"), true),
            (
                format!("fatal: unable to access '{door}/': The requested URL returned error: 403"),
                true,
            ),
            (
                format!("fatal: unable to access '{door}/': The requested URL returned error: 502"),
                false,
            ),
            ("fatal: early EOF\nfatal: fetch-pack: invalid index-pack output".to_owned(), false),
            ("was killed by the time limit".to_owned(), false),
        ] {
            let error = sync(Some("main"), &tail);
            assert_eq!(error.failure.permanent, permanent, "{tail}");
            assert_eq!(error.failure.message, "cannot clone or fetch acme/shop");
            assert_eq!(error.tail, Some(tail));
        }
    }

    #[test]
    fn failed_hook_names_its_exit() {
        for (exit, how) in [
            (Exit::Code(1), "exit 1"),
            (Exit::Signal(9), "killed by signal 9"),
            (Exit::Oom, "killed by the memory limit"),
        ] {
            let BootFailure { message, permanent, .. } =
                PhaseError::of_hook(".harvest/setup.sh", exit).failure;
            assert_eq!(message, format!(".harvest/setup.sh failed ({how})"));
            assert!(permanent);
        }
    }
}
