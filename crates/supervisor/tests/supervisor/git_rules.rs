//! `git pull` and `git stash` in a session's checkout.

use std::{fs, os::unix::fs::PermissionsExt};

use harvest_proto::{
    bridge::*,
    event::{BootPhase, PhaseStatus},
};

use crate::{
    git_requests::{booted, shop},
    harness::{Client, Sandbox},
};

/// What a command in the checkout prints, and whether it succeeded.
fn attempt(sandbox: &Sandbox, client: &mut Client, command: &str) -> (bool, String) {
    let at = sandbox.at("workspace/shop");
    let (exit, output) = client.sh(&format!("cd {} && {{ {command}; }} 2>&1", at.display()));
    (exit == Exit::Code(0), output)
}

/// Commit, files and changes of the checkout.
fn work(sandbox: &Sandbox, client: &mut Client) -> String {
    let look = "git rev-parse HEAD && git status --porcelain -uall && cat README mine && \
                git stash list && git for-each-ref --format='%(refname)' refs/heads refs/stash";
    shop(sandbox, client, look)
}

/// A checkout with staged, changed and new files, and a newer commit at its remote.
fn dirty() -> (Sandbox, Client) {
    let (sandbox, mut client) = booted();
    sandbox.commit("README", "newer\n");
    let author = "git config user.name T && git config user.email t@e";
    shop(&sandbox, &mut client, author);
    shop(&sandbox, &mut client, "echo changed >> README && echo new > mine && git add README");
    (sandbox, client)
}

#[test]
fn stash_is_refused_and_work_stays() {
    let (sandbox, mut client) = dirty();
    let before = work(&sandbox, &mut client);
    for command in [
        "git stash",
        "/usr/bin/git stash push --include-untracked",
        "env -i /usr/bin/git -c user.name=T -c user.email=t@e -c safe.directory='*' stash",
        "git -c alias.put=stash put",
        "git stash store -m x $(git stash create)",
    ] {
        let (done, output) = attempt(&sandbox, &mut client, command);
        assert!(!done && output.contains("git stash is refused"), "{command}: {output}");
        assert!(output.contains("git commit"), "{command}: {output}");
        assert_eq!(work(&sandbox, &mut client), before, "{command}");
    }
    // Without hooks, git itself says why.
    let (done, output) =
        attempt(&sandbox, &mut client, "git -c core.hooksPath=/dev/null stash --all");
    assert!(!done, "{output}");
    assert_eq!(work(&sandbox, &mut client), before);
}

#[test]
fn pull_is_refused_and_work_stays() {
    let (sandbox, mut client) = dirty();
    shop(&sandbox, &mut client, "git branch -q --set-upstream-to origin/main");
    let refused = |sandbox: &Sandbox, client: &mut Client| {
        let before = work(sandbox, client);
        for command in [
            "git pull",
            "/usr/bin/git pull origin main",
            "env -i /usr/bin/git -c safe.directory='*' pull",
            "git -c alias.get='pull --ff-only --no-rebase' get",
            "git pull --rebase --autostash --ff-only",
            "git -c pull.ff=true -c pull.rebase=false pull",
            "git -c core.hooksPath=/dev/null pull",
            "git -c core.hooksPath=/dev/null pull --rebase",
            "git -c core.hooksPath=/dev/null pull --ff-only",
            "GIT_REFLOG_ACTION=x git pull",
        ] {
            let (done, output) = attempt(sandbox, client, command);
            assert!(!done && output.contains("git pull is refused"), "{command}: {output}");
            assert!(output.contains("git rebase"), "{command}: {output}");
            assert_eq!(work(sandbox, client), before, "{command}");
        }
    };
    refused(&sandbox, &mut client);
    // Also when there is nothing left to fetch.
    shop(&sandbox, &mut client, "git fetch -q");
    refused(&sandbox, &mut client);
    // Fetch, commit, rebase and maintenance work.
    let allowed = "git add -A && git commit -q -m wip && git reflog expire --all && git gc -q && \
                   git fsck --no-dangling";
    shop(&sandbox, &mut client, allowed);
    let (_, conflict) = attempt(&sandbox, &mut client, "git rebase origin/main");
    assert!(conflict.contains("CONFLICT"), "{conflict}");
    shop(&sandbox, &mut client, "git rebase --abort && git log --oneline");
}

#[test]
fn own_hook_of_a_repository_still_runs() {
    let (sandbox, _client) = booted();
    let hook = sandbox.at("workspace/shop/.git/hooks/reference-transaction");
    fs::write(&hook, "#!/bin/sh\nread -r _ _ ref && echo $1 $ref >> $HOME/seen\n").unwrap();
    fs::set_permissions(&hook, fs::Permissions::from_mode(0o755)).unwrap();
    let again = Sandbox::start();
    fs::remove_dir(again.at("workspace")).unwrap();
    fs::rename(sandbox.at("workspace"), again.at("workspace")).unwrap();
    let mut boot = sandbox.boot(BootStart::Restore, &[]);
    (boot.agent, boot.env) = (None, Default::default());
    let mut owner = again.owner(1, 0);
    owner.request(|id| ToSupervisor::Boot { id, boot: Box::new(boot) }).unwrap();
    owner.phase(BootPhase::Ready, PhaseStatus::Done);
    shop(&again, &mut owner, "git tag one && git update-ref -d refs/tags/one");
    let seen = fs::read_to_string(again.at("home/seen")).unwrap();
    assert!(seen.contains("prepared refs/tags/one\ncommitted refs/tags/one\n"), "{seen}");
    let (done, output) = attempt(&again, &mut owner, "echo x >> README; git stash");
    assert!(!done && output.contains("git stash is refused"), "{output}");
}
