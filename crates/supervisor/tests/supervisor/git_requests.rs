//! Git requests on a checkout.

use std::{fs, process::Command as Process};

use harvest_proto::{
    bridge::*,
    event::{BootPhase, PhaseStatus},
};

use crate::harness::{Client, Sandbox, git};

/// A sandbox with the checkout `shop`, on branch `main`.
pub(crate) fn booted() -> (Sandbox, Client) {
    let sandbox = Sandbox::start();
    let mut owner = sandbox.owner(1, 0);
    let boot = Boot { agent: None, ..sandbox.boot(BootStart::Build, &[]) };
    owner.request(|id| ToSupervisor::Boot { id, boot: Box::new(boot) }).unwrap();
    owner.phase(BootPhase::Ready, PhaseStatus::Done);
    (sandbox, owner)
}

pub(crate) fn shop(sandbox: &Sandbox, client: &mut Client, script: &str) -> String {
    let script = format!("cd {} && {script}", sandbox.at("workspace/shop").display());
    let (exit, output) = client.sh(&script);
    assert_eq!(exit, Exit::Code(0), "{script}: {output}");
    output.trim().to_owned()
}

pub(crate) fn ask(client: &mut Client, request: GitRequest) -> Result<Reply, Fault> {
    client.request(|id| ToSupervisor::Git { id, request })
}

fn set_branch(client: &mut Client, checkout: &str) -> Result<Reply, Fault> {
    let (checkout, branch) = (checkout.parse().unwrap(), "harvest/new".parse().unwrap());
    ask(client, GitRequest::SetBranch { checkout, branch })
}

#[test]
fn head_names_commit_and_default_branch() {
    let (sandbox, mut client) = booted();
    let commit = Some(shop(&sandbox, &mut client, "git rev-parse HEAD"));
    let default_branch = Some("main".to_owned());
    let head = |name: &str| GitRequest::Head { checkout: name.parse().unwrap() };
    assert_eq!(
        ask(&mut client, head("shop")),
        Ok(Reply::Head { commit, default_branch, has_setup: false })
    );
    let nothing = Ok(Reply::Head { commit: None, default_branch: None, has_setup: false });
    assert_eq!(ask(&mut client, head("gone")), nothing);
}

#[test]
fn fork_gets_own_branch_from_any_head() {
    let (sandbox, mut client) = booted();
    let dirty = "git checkout -q -b own && echo x >> README";
    for before in ["git checkout -q -b harvest/old", "git checkout -q --detach", dirty] {
        shop(&sandbox, &mut client, before);
        let status = shop(&sandbox, &mut client, "git status --porcelain");
        for _ in 0..2 {
            assert_eq!(set_branch(&mut client, "shop"), Ok(Reply::Done));
            let now = shop(&sandbox, &mut client, "git symbolic-ref --short HEAD");
            assert_eq!(now, "harvest/new");
        }
        assert_eq!(shop(&sandbox, &mut client, "git status --porcelain"), status);
        let branches = shop(&sandbox, &mut client, "git branch --format='%(refname:short)'");
        assert!(branches.contains("main") && !branches.contains("harvest/old"), "{branches}");
        shop(&sandbox, &mut client, "git checkout -q main && git branch -q -D harvest/new");
    }
}

#[test]
fn branch_is_set_without_commit_or_checkout() {
    let (sandbox, mut client) = booted();
    assert_eq!(set_branch(&mut client, "gone"), Ok(Reply::Done));
    shop(&sandbox, &mut client, "rm -rf .git && git init -q -b main");
    assert_eq!(set_branch(&mut client, "shop"), Ok(Reply::Done));
    assert_eq!(shop(&sandbox, &mut client, "git symbolic-ref --short HEAD"), "harvest/new");
}

#[test]
fn commit_is_checked_out_and_compared() {
    let (sandbox, mut client) = booted();
    let work = sandbox.at("origin-work");
    let check_out = |client: &mut Client, commit: &str| {
        let checkout = "shop".parse().unwrap();
        ask(client, GitRequest::CheckOut { checkout, branch: None, commit: commit.to_owned() })
    };
    let base = shop(&sandbox, &mut client, "git rev-parse HEAD");
    let quoted = ".harvest/a\\nb".to_owned();
    for (file, changed) in [("src/file", vec![]), (".harvest/a\nb", vec![quoted])] {
        let path = work.join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, file).unwrap();
        git(&work, &["add", "."]);
        git(&work, &["commit", "-q", "-m", file]);
        git(&work, &["push", "-q", "origin", "HEAD:work"]);
        let commit = fs::read_to_string(work.join(".git/refs/heads/main")).unwrap();
        let changed_count = changed.len() as u64;
        let base = Some(base.clone());
        let reply = Reply::CheckedOut { base, declared: None, changed, changed_count };
        shop(&sandbox, &mut client, "git checkout -q main");
        assert_eq!(check_out(&mut client, commit.trim()), Ok(reply));
        assert_eq!(shop(&sandbox, &mut client, "git rev-parse HEAD"), commit.trim());
    }
    for commit in ["0123456789abcdef0123456789abcdef01234567", "HEAD", "--orphan"] {
        assert!(check_out(&mut client, commit).is_err(), "{commit}");
    }
}

/// Commits a change of a file in the clone next to the origin, and pushes it as `branch`.
fn push(sandbox: &Sandbox, file: &str, branch: &str) -> String {
    let work = sandbox.at("origin-work");
    fs::write(work.join(file), branch).unwrap();
    git(&work, &["add", "."]);
    git(&work, &["commit", "-q", "-m", file]);
    git(&work, &["push", "-q", "--force", "origin", &format!("HEAD:{branch}")]);
    fs::read_to_string(work.join(".git/refs/heads/main")).unwrap().trim().to_owned()
}

#[test]
fn shallow_clone_pushes_rebases_and_completes() {
    let sandbox = Sandbox::start();
    sandbox.boot(BootStart::Build, &[]);
    push(&sandbox, "second", "main");
    let mut client = sandbox.owner(1, 0);
    let boot = Boot { agent: None, ..sandbox.boot(BootStart::Build, &[]) };
    client.request(|id| ToSupervisor::Boot { id, boot: Box::new(boot) }).unwrap();
    client.phase(BootPhase::Ready, PhaseStatus::Done);
    // The remote belongs to the user of the test, and the agent pushes to it.
    git(&sandbox.at("origin.git"), &["config", "core.sharedRepository", "0666"]);
    let opened = Process::new("chmod").args(["-R", "a+rwX"]).arg(sandbox.at("origin.git")).status();
    assert!(opened.unwrap().success());
    let count = |client: &mut Client| shop(&sandbox, client, "git rev-list --count HEAD");
    assert_eq!(count(&mut client), "1", "only the newest commit is cloned");
    let work = "git config user.name T && git config user.email t@e && git checkout -q -b work \
                && echo x > mine && git add mine && git commit -q -m Mine && git push -q origin work 2>&1";
    shop(&sandbox, &mut client, work);
    push(&sandbox, "third", "main");
    let rebase = "git fetch -q origin && git rebase -q origin/main && git merge-base HEAD \
                  origin/main && git push -q --force-with-lease origin work";
    shop(&sandbox, &mut client, rebase);
    assert_eq!(count(&mut client), "3");
    assert_eq!(shop(&sandbox, &mut client, "git diff --stat origin/main...HEAD | wc -l"), "2");
    shop(&sandbox, &mut client, "git fetch -q --unshallow && git log --oneline > /dev/null");
    assert_eq!(count(&mut client), "4", "the history is complete on demand");
}

#[test]
fn pushed_commit_has_merge_base_with_newer_build() {
    let sandbox = Sandbox::start();
    sandbox.boot(BootStart::Build, &[]);
    // A session started from the first commit; the build has the third.
    let old = push(&sandbox, "mine", "work");
    let work = sandbox.at("origin-work");
    git(&work, &["reset", "-q", "--hard", "HEAD~1"]);
    push(&sandbox, "second", "main");
    push(&sandbox, "third", "main");
    let mut client = sandbox.owner(1, 0);
    let boot = Boot { agent: None, ..sandbox.boot(BootStart::Build, &[]) };
    client.request(|id| ToSupervisor::Boot { id, boot: Box::new(boot) }).unwrap();
    client.phase(BootPhase::Ready, PhaseStatus::Done);
    let (checkout, branch) = ("shop".parse().unwrap(), "work".parse().ok());
    let reply = ask(&mut client, GitRequest::CheckOut { checkout, branch, commit: old.clone() });
    assert!(matches!(reply, Ok(Reply::CheckedOut { changed_count: 0, .. })), "{reply:?}");
    let changed = shop(&sandbox, &mut client, "git diff --name-only origin/main...HEAD");
    assert_eq!(changed, "mine");
}
