//! Several checkouts beside each other, and disks that hold some of them.

use std::{fs, os::unix::fs::PermissionsExt};

use harvest_proto::{
    EventBody,
    bridge::{Boot, BootStart, Checkout, ToSupervisor},
    event::{BootPhase, PhaseStatus},
};

use crate::harness::Sandbox;

const SETUP: &str = "basename $PWD >> $HOME/set-up";

/// The sandbox's own repository under two names, with a hook that says where it ran.
fn two(sandbox: &Sandbox, start: BootStart) -> Boot {
    let boot = sandbox.boot(start, &[(".harvest/setup.sh", SETUP)]);
    let other =
        Checkout { name: "lib".into(), clone_missing: true, ..boot.repositories[0].clone() };
    Boot { agent: None, repositories: vec![boot.repositories[0].clone(), other], ..boot }
}

fn boot(sandbox: &Sandbox, boot: Boot) {
    let mut owner = sandbox.owner(1, 0);
    owner.ask(|id| ToSupervisor::Boot { id, boot: Box::new(boot) }).unwrap();
    owner.phase(BootPhase::Ready, PhaseStatus::Done);
}

fn heads(sandbox: &Sandbox) -> [String; 2] {
    ["shop", "lib"].map(|name| {
        fs::read_to_string(sandbox.at("workspace").join(name).join(".git/HEAD")).unwrap_or_default()
    })
}

const BRANCH: &str = "ref: refs/heads/harvest/work\n";

/// A sandbox whose disk holds the primary checkout only, as a build leaves it.
fn with_primary() -> Sandbox {
    let built = Sandbox::start();
    let mut build = two(&built, BootStart::Build);
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
fn repositories_are_cloned_beside_each_other_and_each_is_set_up() {
    let sandbox = Sandbox::start();
    boot(&sandbox, two(&sandbox, BootStart::Fresh));
    assert_eq!(heads(&sandbox), [BRANCH, BRANCH]);
    assert_eq!(fs::read_to_string(sandbox.at("home/set-up")).unwrap(), "shop\nlib\n");
}

#[test]
fn a_clone_has_its_name_only_once_it_is_whole() {
    let sandbox = Sandbox::start();
    // What git asks to make each file in the middle of a clone, and what an earlier one left.
    let spy = sandbox.at("home/spy");
    let spying = "#!/bin/sh\nbasename \"$PWD\" >> $HOME/cloning\n\
                  test ! -e ../shop && echo apart >> $HOME/cloning\nexec cat\n";
    fs::write(&spy, spying).unwrap();
    fs::set_permissions(&spy, fs::Permissions::from_mode(0o755)).unwrap();
    let (spy, attributes) = (spy.display(), sandbox.at("home/attributes"));
    fs::write(&attributes, "* filter=spy\n").unwrap();
    let settings = format!(
        "[core]\n\tattributesFile = {}\n[filter \"spy\"]\n\tsmudge = {spy}\n\tclean = cat\n",
        attributes.display()
    );
    fs::write(sandbox.at("home/.gitconfig"), settings).unwrap();
    fs::create_dir_all(sandbox.at("workspace/.shop.part/.git")).unwrap();
    let mut one = two(&sandbox, BootStart::Fresh);
    one.repositories.truncate(1);
    boot(&sandbox, one);
    let cloning = fs::read_to_string(sandbox.at("home/cloning")).unwrap();
    assert!(cloning.starts_with(".shop.part\napart\n"), "{cloning}");
    assert_eq!(heads(&sandbox)[0], BRANCH);
    assert!(!sandbox.at("workspace/.shop.part").exists());
}

#[test]
fn what_an_image_does_not_hold_is_cloned_and_only_that_is_set_up() {
    let built = with_primary();
    let sandbox = on_the_disk_of(&built);
    boot(&sandbox, two(&built, BootStart::Image));
    assert_eq!(heads(&sandbox), [BRANCH, BRANCH]);
    assert_eq!(fs::read_to_string(sandbox.at("home/set-up")).unwrap(), "lib\n");
}

#[test]
fn what_a_restored_disk_lacks_is_cloned_when_asked_for_and_never_silently() {
    let built = with_primary();
    let sandbox = on_the_disk_of(&built);
    let mut owner = sandbox.owner(1, 0);
    let order = Box::new(two(&built, BootStart::Restore));
    owner.ask(|id| ToSupervisor::Boot { id, boot: order }).unwrap();
    let told = owner.event(|body| matches!(body, EventBody::Warning { .. }));
    assert!(matches!(&told, EventBody::Warning { message } if message.contains("lib")), "{told:?}");
    owner.phase(BootPhase::Ready, PhaseStatus::Done);
    assert_eq!(
        heads(&sandbox),
        ["ref: refs/heads/main\n", BRANCH],
        "what was there stays as it is"
    );

    let sandbox = on_the_disk_of(&sandbox);
    fs::remove_dir_all(sandbox.at("workspace/lib")).unwrap();
    let mut restore = two(&built, BootStart::Restore);
    restore.repositories[1].clone_missing = false;
    boot(&sandbox, restore);
    assert_eq!(heads(&sandbox)[1], "", "a turn may have removed it");
}

#[test]
fn without_a_repository_the_workspace_is_empty() {
    let sandbox = Sandbox::start();
    let boot_order = Boot { repositories: Vec::new(), ..two(&sandbox, BootStart::Fresh) };
    boot(&sandbox, boot_order);
    assert_eq!(fs::read_dir(sandbox.at("workspace")).unwrap().count(), 0);
}
