//! Several checkouts, and disks that contain some of them.

use std::{fs, os::unix::fs::PermissionsExt};

use harvest_proto::{
    EventBody,
    bridge::{Boot, BootStart, Checkout, ToSupervisor},
    event::{BootPhase, PhaseStatus},
};

use crate::harness::{Client, Sandbox, git};

const SETUP: &str = "basename $PWD >> $HOME/set-up";

/// The same repository under two names, with a hook that records where it ran.
fn two_checkouts(sandbox: &Sandbox, start: BootStart) -> Boot {
    let boot = sandbox.boot(start, &[(".harvest/setup.sh", SETUP)]);
    let other = Checkout {
        name: "acme/lib".parse().unwrap(),
        folder: "lib".parse().unwrap(),
        clone_missing: true,
        ..boot.repositories[0].clone()
    };
    Boot { agent: None, repositories: vec![boot.repositories[0].clone(), other], ..boot }
}

fn boot(sandbox: &Sandbox, boot: Boot) {
    let mut owner = sandbox.owner(1, 0);
    owner.request(|id| ToSupervisor::Boot { id, boot: Box::new(boot) }).unwrap();
    owner.phase(BootPhase::Ready, PhaseStatus::Done);
}

fn heads(sandbox: &Sandbox) -> [String; 2] {
    ["shop", "lib"].map(|name| {
        fs::read_to_string(sandbox.at("workspace").join(name).join(".git/HEAD")).unwrap_or_default()
    })
}

const BRANCH: &str = "ref: refs/heads/harvest/work\n";

/// A sandbox whose disk contains only the primary checkout, as after a build.
fn built_sandbox() -> Sandbox {
    let built = Sandbox::start();
    let mut build = two_checkouts(&built, BootStart::Build);
    build.repositories.truncate(1);
    boot(&built, build);
    built
}

fn on_the_disk_of(built: &Sandbox) -> Sandbox {
    let next = Sandbox::start();
    fs::remove_dir(next.at("workspace")).unwrap();
    fs::rename(built.at("workspace"), next.at("workspace")).unwrap();
    next
}

#[test]
fn every_repository_is_cloned_and_set_up() {
    let sandbox = Sandbox::start();
    boot(&sandbox, two_checkouts(&sandbox, BootStart::Fresh));
    assert_eq!(heads(&sandbox), [BRANCH, BRANCH]);
    assert_eq!(fs::read_to_string(sandbox.at("home/set-up")).unwrap(), "shop\nlib\n");
}

fn synced(owner: &mut Client) -> Vec<(Option<String>, Option<String>)> {
    let synced = owner.event(|body| matches!(body, EventBody::Synced { .. }));
    let EventBody::Synced { checkouts, .. } = synced else { unreachable!() };
    checkouts.into_iter().map(|checkout| (checkout.before, checkout.after)).collect()
}

#[test]
fn synced_has_commits_before_and_after() {
    let built = Sandbox::start();
    let mut build = two_checkouts(&built, BootStart::Build);
    build.repositories.truncate(1);
    let mut owner = built.owner(1, 0);
    owner.request(|id| ToSupervisor::Boot { id, boot: Box::new(build.clone()) }).unwrap();
    let [(None, Some(first))] = &synced(&mut owner)[..] else { panic!("a clone has no before") };
    owner.phase(BootPhase::Ready, PhaseStatus::Done);
    let second = built.commit("README", "newer\n");
    for (start, after) in [(BootStart::Restore, first), (BootStart::Image, &second)] {
        let sandbox = on_the_disk_of(&built);
        let mut owner = sandbox.owner(1, 0);
        let boot = Box::new(Boot { start, ..build.clone() });
        owner.request(|id| ToSupervisor::Boot { id, boot }).unwrap();
        assert_eq!(synced(&mut owner), [(Some(first.clone()), Some(after.clone()))], "{start:?}");
        owner.phase(BootPhase::Ready, PhaseStatus::Done);
        fs::rename(sandbox.at("workspace"), built.at("workspace")).unwrap();
    }
}

#[test]
fn clone_is_renamed_only_when_complete() {
    let sandbox = Sandbox::start();
    // A filter that git runs for each file during a clone, and the remains of an interrupted clone.
    let spy = sandbox.at("home/spy");
    let script = "#!/bin/sh\nbasename \"$PWD\" >> $HOME/cloning\n\
                  test ! -e ../shop && echo apart >> $HOME/cloning\nexec cat\n";
    fs::write(&spy, script).unwrap();
    fs::set_permissions(&spy, fs::Permissions::from_mode(0o755)).unwrap();
    let (spy, attributes) = (spy.display(), sandbox.at("home/attributes"));
    fs::write(&attributes, "* filter=spy\n").unwrap();
    let settings = format!(
        "[core]\n\tattributesFile = {}\n[filter \"spy\"]\n\tsmudge = {spy}\n\tclean = cat\n",
        attributes.display()
    );
    fs::write(sandbox.at("home/.gitconfig"), settings).unwrap();
    fs::create_dir_all(sandbox.at("workspace/.shop.part/.git")).unwrap();
    let mut one = two_checkouts(&sandbox, BootStart::Fresh);
    one.repositories.truncate(1);
    boot(&sandbox, one);
    let cloning = fs::read_to_string(sandbox.at("home/cloning")).unwrap();
    assert!(cloning.starts_with(".shop.part\napart\n"), "{cloning}");
    assert_eq!(heads(&sandbox)[0], BRANCH);
    assert!(!sandbox.at("workspace/.shop.part").exists());
}

#[test]
fn only_repositories_missing_in_image_are_setup() {
    let built = built_sandbox();
    let sandbox = on_the_disk_of(&built);
    boot(&sandbox, two_checkouts(&built, BootStart::Image));
    assert_eq!(heads(&sandbox), [BRANCH, BRANCH]);
    assert_eq!(fs::read_to_string(sandbox.at("home/set-up")).unwrap(), "lib\n");
}

#[test]
fn restore_clones_missing_checkout_with_a_warning() {
    let built = built_sandbox();
    let sandbox = on_the_disk_of(&built);
    let mut owner = sandbox.owner(1, 0);
    let request = Box::new(two_checkouts(&built, BootStart::Restore));
    owner.request(|id| ToSupervisor::Boot { id, boot: request }).unwrap();
    let warning = owner.event(|body| matches!(body, EventBody::Warning { .. }));
    assert!(
        matches!(&warning, EventBody::Warning { message } if message.contains("lib")),
        "{warning:?}"
    );
    owner.phase(BootPhase::Ready, PhaseStatus::Done);
    assert_eq!(
        heads(&sandbox),
        ["ref: refs/heads/main\n", BRANCH],
        "the existing checkout is unchanged"
    );

    let sandbox = on_the_disk_of(&sandbox);
    fs::remove_dir_all(sandbox.at("workspace/lib")).unwrap();
    let mut restore = two_checkouts(&built, BootStart::Restore);
    restore.repositories[1].clone_missing = false;
    boot(&sandbox, restore);
    assert_eq!(heads(&sandbox)[1], "", "a turn may have removed it");
}

#[test]
fn checkout_of_another_owner_keeps_its_origin() {
    let sandbox = Sandbox::start();
    let mut restore = two_checkouts(&sandbox, BootStart::Restore);
    restore.repositories.truncate(1);
    let at_door = |owner: &str| format!("http://git.harvest.internal/{owner}/shop.git");
    restore.repositories[0].remote = at_door("acme");
    let shop = sandbox.at("workspace/shop");
    fs::create_dir_all(&shop).unwrap();
    git(&shop, &["init", "-q"]);
    git(&shop, &["remote", "add", "origin", &at_door("other")]);
    let mut owner = sandbox.owner(1, 0);
    owner.request(|id| ToSupervisor::Boot { id, boot: Box::new(restore) }).unwrap();
    let warning = owner.event(|body| matches!(body, EventBody::Warning { .. }));
    let expected = format!("is a checkout of {}", at_door("other"));
    assert!(
        matches!(&warning, EventBody::Warning { message } if message.contains(&expected)),
        "{warning:?}"
    );
    owner.phase(BootPhase::Ready, PhaseStatus::Done);
    let config = fs::read_to_string(shop.join(".git/config")).unwrap();
    assert!(config.contains(&at_door("other")), "{config}");
}

#[test]
fn new_session_refuses_checkout_of_another_owner() {
    let sandbox = Sandbox::start();
    let mut restore = two_checkouts(&sandbox, BootStart::Restore);
    restore.repositories.truncate(1);
    restore.repositories[0].clone_missing = true;
    restore.repositories[0].remote = "http://git.harvest.internal/acme/shop.git".to_owned();
    let shop = sandbox.at("workspace/shop");
    fs::create_dir_all(&shop).unwrap();
    git(&shop, &["init", "-q"]);
    git(&shop, &["remote", "add", "origin", "http://git.harvest.internal/other/shop.git"]);
    let mut owner = sandbox.owner(1, 0);
    owner.request(|id| ToSupervisor::Boot { id, boot: Box::new(restore) }).unwrap();
    owner.phase(BootPhase::Sync, PhaseStatus::Failed);
}

#[test]
fn workspace_is_empty_without_repositories() {
    let sandbox = Sandbox::start();
    let boot_request =
        Boot { repositories: Vec::new(), ..two_checkouts(&sandbox, BootStart::Fresh) };
    boot(&sandbox, boot_request);
    assert_eq!(fs::read_dir(sandbox.at("workspace")).unwrap().count(), 0);
}

#[test]
fn boots_fetch_only_base_and_own_branch() {
    let built = built_sandbox();
    let work = built.at("origin-work");
    for branch in ["harvest/other", "harvest/work"] {
        git(&work, &["checkout", "-q", "-B", branch, "main"]);
        fs::write(work.join("pushed"), branch).unwrap();
        git(&work, &["add", "."]);
        git(&work, &["commit", "-q", "-m", branch]);
        git(&work, &["push", "-q", "origin", branch]);
    }
    let sandbox = on_the_disk_of(&built);
    boot(&sandbox, two_checkouts(&built, BootStart::Image));
    let refs = |name: &str| {
        let mut owner = sandbox.owner(1, 0);
        let list = format!("cd {}; git branch -r --format='%(refname)'", name);
        owner.sh(&list).1
    };
    let folder = |name: &str| sandbox.at("workspace").join(name).display().to_string();
    let fetched = refs(&folder("shop"));
    assert!(fetched.contains("origin/harvest/work\n"), "{fetched}");
    let cloned = refs(&folder("lib"));
    assert!(cloned.contains("origin/main\n"), "{cloned}");
    for found in [fetched, cloned] {
        assert!(!found.contains("harvest/other"), "{found}");
    }
    let mut owner = sandbox.owner(1, 0);
    let fetch = format!("cd {}; git fetch -q && git branch -r", folder("lib"));
    let all = owner.sh(&fetch).1;
    assert!(all.contains("origin/harvest/other"), "the agent's own fetch brings all: {all}");
}

#[test]
fn missing_base_fails_the_boot_for_good() {
    let built = built_sandbox();
    for start in [BootStart::Fresh, BootStart::Image] {
        let sandbox = match start {
            BootStart::Fresh => Sandbox::start(),
            _ => on_the_disk_of(&built),
        };
        let mut request = two_checkouts(&built, start);
        request.repositories[0].base = Some("nope".parse().unwrap());
        let mut owner = sandbox.owner(1, 0);
        owner.request(|id| ToSupervisor::Boot { id, boot: Box::new(request) }).unwrap();
        let failed = owner
            .event(|body| matches!(body, EventBody::BootPhase { status: PhaseStatus::Failed, .. }));
        let EventBody::BootPhase { failure: Some(failure), .. } = failed else {
            panic!("{failed:?}")
        };
        assert_eq!(failure.message, "branch nope does not exist in acme/shop");
        assert!(failure.permanent);
    }
}
