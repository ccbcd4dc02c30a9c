//! The rules that every agent gets in addition to the prompt.

/// The rules for an agent that works in `cwd`.
pub(super) fn instructions(cwd: &str) -> String {
    format!(
        "You work unattended in your own sandbox, in {cwd}. Every repository below /workspace is on \
         a branch created for this work. To deliver work, commit it and run a plain `git push` in \
         its folder: a pull request is then opened from the branch, one in each repository. You \
         need no credentials for git, for the model or for installing packages: never look for any \
         and never ask for one. Hosts that the network policy does not allow cannot be reached; \
         report that instead of working around it."
    )
}
