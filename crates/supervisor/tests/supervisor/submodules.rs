//! Submodules and files in Git LFS: what a checkout gets at its boot.

use std::{fs, os::unix::fs::PermissionsExt, path::Path};

use harvest_proto::{
    EventBody,
    bridge::{Boot, BootStart, Checkout, GitRequest, Reply, ToSupervisor},
    event::{BootPhase, PhaseStatus},
};

use crate::harness::{Client, Sandbox, git};

const HERE: &str = "https://git.example.org/acme/shop.git";

/// A bare repository beside the origin, with one file; returns its commit.
fn library(sandbox: &Sandbox, name: &str) -> String {
    let (bare, work) = (sandbox.at(&format!("{name}.git")), sandbox.at(&format!("{name}-work")));
    let folder = bare.parent().unwrap().to_owned();
    git(&folder, &["init", "-q", "--bare", "-b", "main", bare.to_str().unwrap()]);
    git(&folder, &["clone", "-q", bare.to_str().unwrap(), work.to_str().unwrap()]);
    fs::write(work.join("code"), name).unwrap();
    commit(&work, "main")
}

fn commit(work: &Path, branch: &str) -> String {
    git(work, &["add", "."]);
    git(work, &["commit", "-q", "-m", "change"]);
    git(work, &["push", "-q", "origin", &format!("HEAD:{branch}")]);
    git(work, &["rev-parse", "HEAD"])
}

fn add_link(work: &Path, path: &str, commit: &str) {
    // Git takes a missing folder for a deleted submodule.
    fs::create_dir_all(work.join(path)).unwrap();
    git(work, &["update-index", "--add", "--cacheinfo", &format!("160000,{commit},{path}")]);
}

fn checkout(sandbox: &Sandbox, name: &str) -> Checkout {
    Checkout {
        name: format!("acme/{name}").parse().unwrap(),
        folder: name.parse().unwrap(),
        remote: format!("file://{}", sandbox.at(&format!("{name}.git")).display()),
        url: Some(format!("https://git.example.org/acme/{name}.git")),
        base: None,
        branch: None,
        clone_missing: true,
    }
}

/// Boots a build of the origin beside these libraries, and returns the warnings.
fn built(sandbox: &Sandbox, client: &mut Client, libraries: &[&str]) -> Vec<String> {
    let boot = sandbox.boot(BootStart::Build, &[]);
    let mut shop = boot.repositories[0].clone();
    shop.url = Some(HERE.to_owned());
    let others = libraries.iter().map(|name| checkout(sandbox, name));
    let repositories = std::iter::once(shop).chain(others).collect();
    let git_hosts = vec!["git.public.example".to_owned()];
    let boot = Boot { agent: None, repositories, git_hosts, ..boot };
    client.request(|id| ToSupervisor::Boot { id, boot: Box::new(boot) }).unwrap();
    let ready = (BootPhase::Ready, PhaseStatus::Done);
    let is_ready = |body: &EventBody| matches!(body, EventBody::BootPhase { phase, status, .. } if (*phase, *status) == ready);
    client.until(|client| client.events.iter().find(|event| is_ready(&event.body)).map(drop));
    let warning = |body: &EventBody| match body {
        EventBody::Warning { message } => Some(message.clone()),
        _ => None,
    };
    client.events.iter().filter_map(|event| warning(&event.body)).collect()
}

#[test]
fn own_repositories_are_fetched_as_submodules() {
    let sandbox = Sandbox::start();
    sandbox.boot(BootStart::Build, &[]);
    let (inner, outer) = (library(&sandbox, "inner"), sandbox.at("lib-work"));
    library(&sandbox, "lib");
    fs::write(outer.join(".gitmodules"), "[submodule \"in\"]\npath = in\nurl = ../inner.git\n")
        .unwrap();
    add_link(&outer, "in", &inner);
    let lib = commit(&outer, "main");
    let work = sandbox.at("origin-work");
    let text =
        "[submodule \"libs/lib\"]\n\tpath = libs/lib\n\turl = git@git.example.org:acme/lib.git\n";
    fs::write(work.join(".gitmodules"), text).unwrap();
    add_link(&work, "libs/lib", &lib);
    commit(&work, "main");
    let mut client = sandbox.owner(1, 0);
    assert_eq!(built(&sandbox, &mut client, &["lib", "inner"]), Vec::<String>::new());
    let shop = sandbox.at("workspace/shop");
    let read = |path: &str| fs::read_to_string(shop.join(path)).unwrap();
    assert_eq!((read("libs/lib/code"), read("libs/lib/in/code")), ("lib".into(), "inner".into()));

    // The commit to be checked has another commit of the library.
    fs::write(outer.join("code"), "newer").unwrap();
    let newer = commit(&outer, "other");
    add_link(&work, "libs/lib", &newer);
    let pushed = commit(&work, "work");
    let (checkout, branch) = ("shop".parse().unwrap(), None);
    let request = GitRequest::CheckOut { checkout, branch, commit: pushed };
    let reply = client.request(|id| ToSupervisor::Git { id, request });
    assert!(matches!(reply, Ok(Reply::CheckedOut { .. })), "{reply:?}");
    assert_eq!(read("libs/lib/code"), "newer");
}

#[test]
fn hostile_and_unknown_submodules_stay_empty() {
    let sandbox = Sandbox::start();
    sandbox.boot(BootStart::Build, &[]);
    let lib = library(&sandbox, "lib");
    let work = sandbox.at("origin-work");
    let marker = sandbox.at("executed");
    let local = format!("file://{}", sandbox.at("lib.git").display());
    let evil = format!("ext::sh -c touch% {}", marker.display());
    let mut text = String::new();
    for (name, path, url) in [
        ("a", "a", evil.as_str()),
        ("b", "b", local.as_str()),
        ("../../evil", "c", "https://git.example.org/acme/lib.git"),
        ("d", "../d", "https://git.example.org/acme/lib.git"),
        ("e", "e", "--upload-pack=evil"),
        ("f", "f", "https://unknown.example/acme/lib.git"),
    ] {
        text += &format!(
            "[submodule \"{name}\"]\n\tpath = {path}\n\turl = {url}\n\tupdate = !touch {}\n",
            marker.display()
        );
        if !path.starts_with('.') {
            add_link(&work, path, &lib);
        }
    }
    fs::write(work.join(".gitmodules"), text).unwrap();
    commit(&work, "main");
    let warnings = built(&sandbox, &mut sandbox.owner(1, 0), &["lib"]);
    assert_eq!(warnings.len(), 6, "{warnings:#?}");
    for (name, part) in [("`a`", "its URL"), ("`../../evil`", "its name"), ("`d`", "its path")] {
        let warning = warnings.iter().find(|warning| warning.contains(name));
        assert!(warning.is_some_and(|one| one.contains(part)), "{name}: {warnings:#?}");
    }
    let unknown = warnings.last().unwrap();
    let hint = "`harvest run -r THIS -r https://unknown.example/acme/lib.git`";
    assert!(unknown.contains("`f` is left empty") && unknown.contains(hint), "{unknown}");
    assert!(!marker.exists());
    for path in ["a", "b", "c", "e", "f"] {
        assert!(!sandbox.at("workspace/shop").join(path).join("code").exists(), "{path}");
    }
}

#[test]
fn files_in_lfs_stay_pointers_with_one_warning() {
    let sandbox = Sandbox::start();
    // As `git lfs install` does, with a program that fails as without a server.
    let filter = "[filter \"lfs\"]\n\tclean = /bin/false\n\tsmudge = /bin/false\n\
                  \tprocess = /bin/false\n\trequired = true\n";
    let home = sandbox.at("home");
    fs::create_dir_all(&home).unwrap();
    let config = home.join(".gitconfig");
    let existing = fs::read_to_string(&config).unwrap_or_default();
    fs::write(&config, existing + filter).unwrap();
    fs::set_permissions(&config, fs::Permissions::from_mode(0o666)).unwrap();
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n";
    let attributes = (".gitattributes", "*.bin filter=lfs diff=lfs merge=lfs -text\n");
    sandbox.boot(BootStart::Build, &[attributes, ("a.bin", pointer), ("assets/b.bin", pointer)]);
    let warnings = built(&sandbox, &mut sandbox.owner(1, 0), &[]);
    assert_eq!(warnings.len(), 1, "{warnings:#?}");
    assert!(
        warnings[0].starts_with("acme/shop keeps files in Git LFS (2 of them, such as a.bin)"),
        "{warnings:?}"
    );
    let checked_out = fs::read_to_string(sandbox.at("workspace/shop/a.bin")).unwrap();
    assert_eq!(checked_out, pointer);
}
