//! Builds that continue an earlier one.

use super::*;

const MAKEFILE: &str = "all:\n\techo built >> ../../home/log\n";

/// A build, and its log so far, which every build appends to.
struct Built(Sandbox);

impl Built {
    /// The first build of a repository with these files.
    fn new(files: &[(&str, &str)]) -> Self {
        let sandbox = Sandbox::start();
        let boot = sandbox.boot(BootStart::Build, files);
        let mut owner = sandbox.owner(1, 0);
        let boot = Box::new(Boot { agent: None, ..boot });
        owner.request(|id| ToSupervisor::Boot { id, boot }).unwrap();
        owner.phase(BootPhase::Ready, PhaseStatus::Done);
        Self(sandbox)
    }

    /// Continues the build in another sandbox on the same disk. Returns the event of its end or
    /// failure.
    fn rebuild(&self) -> EventBody {
        self.rebuild_of(None)
    }

    fn rebuild_of(&self, base: Option<&str>) -> EventBody {
        let next = Sandbox::start();
        for folder in ["workspace", "home"] {
            let _may_be_empty = fs::remove_dir_all(next.at(folder));
            fs::rename(self.0.at(folder), next.at(folder)).unwrap();
        }
        let mut boot = Boot { agent: None, ..self.0.boot(BootStart::Rebuild, &[]) };
        boot.repositories[0].base = base.map(|base| base.parse().unwrap());
        let mut owner = next.owner(1, 0);
        owner.request(|id| ToSupervisor::Boot { id, boot: Box::new(boot) }).unwrap();
        let last = owner.event(|body| match body {
            EventBody::BootPhase { phase, status, .. } => {
                *phase == BootPhase::Ready || *status == PhaseStatus::Failed
            }
            _ => false,
        });
        for folder in ["workspace", "home"] {
            fs::rename(next.at(folder), self.0.at(folder)).unwrap();
        }
        last
    }

    fn log(&self) -> String {
        fs::read_to_string(self.0.at("home/log")).unwrap_or_default()
    }
}

/// Why a rebuild has to start over, if it has to.
fn start_over(last: &EventBody) -> Option<&str> {
    match last {
        EventBody::BootPhase { failure: Some(failure), .. } => {
            failure.start_over.then_some(failure.message.as_str())
        }
        _ => None,
    }
}

#[test]
fn rebuild_without_moved_dependencies_only_builds_the_project() {
    let files = [("Makefile", MAKEFILE), (".harvest/setup.sh", "echo setup >> $HOME/log\n")];
    let built = Built::new(&files);
    assert_eq!(built.log(), "built\nsetup\n");
    let commit = built.0.commit("README", "newer\n");
    let last = built.rebuild();
    assert!(matches!(last, EventBody::BootPhase { phase: BootPhase::Ready, .. }), "{last:?}");
    assert_eq!(built.log(), "built\nsetup\nbuilt\n", "setup does not run again");
    let head = git(&built.0.at("workspace/shop"), &["rev-parse", "HEAD"]);
    assert_eq!(head, commit);
}

#[test]
fn moved_manifest_installs_and_sets_up_again() {
    let files = [("Makefile", MAKEFILE), (".harvest/setup.sh", "echo setup >> $HOME/log\n")];
    let built = Built::new(&files);
    built.0.commit("Makefile", &format!("{MAKEFILE}\techo more >> ../../home/log\n"));
    let last = built.rebuild();
    assert!(matches!(last, EventBody::BootPhase { phase: BootPhase::Ready, .. }), "{last:?}");
    assert_eq!(built.log(), "built\nsetup\nbuilt\nmore\nsetup\n");
}

#[test]
fn moved_pins_and_harvest_folder_start_over() {
    for (file, why) in [
        ("api/.python-version", "a pinned version of Node or Python moved"),
        (".harvest/setup.sh", "`.harvest/` moved"),
        (".harvest/config.toml", "`.harvest/` moved"),
    ] {
        let built = Built::new(&[("api/setup.cfg", "")]);
        if file.ends_with("version") {
            // A pin belongs to a project; this one needs nothing to be installed.
            built.0.commit("api/requirements.txt", "");
        }
        built.0.commit(file, "3.11\n");
        assert_eq!(start_over(&built.rebuild()), Some(why), "{file}");
    }
}

#[test]
fn rebuild_follows_a_replaced_base() {
    let built = Built::new(&[("Makefile", MAKEFILE)]);
    let work = built.0.at("origin-work");
    git(&work, &["checkout", "-q", "--orphan", "other"]);
    fs::write(work.join("README"), "other history\n").unwrap();
    git(&work, &["commit", "-q", "-a", "-m", "other"]);
    git(&work, &["push", "-q", "--force", "origin", "HEAD:main"]);
    let last = built.rebuild();
    assert!(matches!(last, EventBody::BootPhase { phase: BootPhase::Ready, .. }), "{last:?}");
    let readme = fs::read_to_string(built.0.at("workspace/shop/README")).unwrap();
    assert_eq!(readme, "other history\n");
}

#[test]
fn rebuild_fails_without_its_branch() {
    let built = Built::new(&[("Makefile", MAKEFILE)]);
    let bare = built.0.at("origin.git");
    git(&bare, &["branch", "-m", "main", "gone"]);
    let last = built.rebuild_of(Some("main"));
    let EventBody::BootPhase { failure: Some(failure), .. } = last else { panic!("{last:?}") };
    assert!(failure.permanent && !failure.start_over, "{failure:?}");
    assert_eq!(failure.message, "branch main does not exist in acme/shop");
}

#[test]
fn rebuild_runs_no_hooks_that_a_build_left() {
    let built = Built::new(&[("Makefile", MAKEFILE)]);
    let dot_git = built.0.at("workspace/shop/.git");
    let marker = built.0.at("home").join("hook-ran");
    let script = format!("#!/bin/sh\ntouch {}\n", marker.display());
    for hook in ["post-checkout", "reference-transaction", "post-index-change", "monitor"] {
        let hook = dot_git.join("hooks").join(hook);
        fs::create_dir_all(hook.parent().unwrap()).unwrap();
        fs::write(&hook, &script).unwrap();
        fs::set_permissions(&hook, fs::Permissions::from_mode(0o755)).unwrap();
    }
    let monitor = dot_git.join("hooks/monitor");
    let config = dot_git.join("config");
    let text = fs::read_to_string(&config).unwrap();
    fs::write(&config, format!("{text}[core]\n\tfsmonitor = {}\n", monitor.display())).unwrap();
    built.0.commit("README", "newer\n");
    let last = built.rebuild();
    assert!(matches!(last, EventBody::BootPhase { phase: BootPhase::Ready, .. }), "{last:?}");
    assert!(!marker.exists());
}
