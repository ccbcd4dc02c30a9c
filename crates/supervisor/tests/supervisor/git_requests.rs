//! Git requests on a checkout.

use std::fs;

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
        let (checkout, branch) = ("shop".parse().unwrap(), "work".parse().unwrap());
        ask(client, GitRequest::CheckOut { checkout, branch, commit: commit.to_owned() })
    };
    for (folder, changed_harvest_folder) in [("src", false), (".harvest", true)] {
        fs::create_dir_all(work.join(folder)).unwrap();
        fs::write(work.join(folder).join("file"), folder).unwrap();
        git(&work, &["add", "."]);
        git(&work, &["commit", "-q", "-m", folder]);
        git(&work, &["push", "-q", "origin", "HEAD:work"]);
        let commit = fs::read_to_string(work.join(".git/refs/heads/main")).unwrap();
        let reply = Ok(Reply::CheckedOut { changed_harvest_folder });
        assert_eq!(check_out(&mut client, commit.trim()), reply);
        assert_eq!(shop(&sandbox, &mut client, "git rev-parse HEAD"), commit.trim());
    }
    for commit in ["0123456789abcdef0123456789abcdef01234567", "HEAD", "--orphan"] {
        assert!(check_out(&mut client, commit).is_err(), "{commit}");
    }
}
