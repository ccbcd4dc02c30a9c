//! What the engine finds out about its host, on a host that can run sandboxes, and on one that cannot.

use super::*;
use harvest_engine::{Finding, Level, probe::FINDINGS};

fn finding<'a>(findings: &'a [Finding], id: &str) -> &'a Finding {
    findings
        .iter()
        .find(|finding| finding.id == id)
        .unwrap_or_else(|| panic!("no {id} in {findings:?}"))
}

#[test]
fn a_host_that_runs_sandboxes_is_found_fit_and_nothing_is_left_of_the_trials() {
    let world = World::new();
    let running = world.start();
    let findings = world.engine.probe();
    let ids: Vec<&str> = findings.iter().map(|finding| finding.id).collect();
    assert_eq!(ids, FINDINGS[1..], "each once, in order: {findings:?}");
    let failed: Vec<&Finding> =
        findings.iter().filter(|finding| finding.level == Level::Fail).collect();
    assert!(failed.is_empty(), "{failed:?}");
    assert!(findings.iter().all(|finding| (finding.level == Level::Ok) == finding.fix.is_none()));
    assert_eq!(shell(&running, "echo on").out, "on");
    let left = fs::read_dir(world.home.join("trash")).unwrap().flatten();
    assert!(left.into_iter().all(|entry| !named(&entry.path()).starts_with("probe")));
    for group in world.groups() {
        let beside = fs::read_dir(group.parent().unwrap()).unwrap().flatten();
        // Others may be at it at the same time: what a dead process left is what counts.
        let left = beside
            .filter_map(|entry| named(&entry.path()).strip_prefix("harvest-probe-")?.parse().ok());
        assert!(left.into_iter().all(|pid: u32| uid(pid).is_some()));
    }
}

#[test]
fn a_home_in_which_no_layer_can_be_made_is_found_out() {
    // Procfs takes no folders, so the trial of layers cannot even begin there.
    let findings = HostCommand::new(env!("CARGO_BIN_EXE_harvest-zygote"))
        .args(["--probe", "/proc/self"])
        .output()
        .unwrap();
    let said: serde_json::Value = serde_json::from_slice(&findings.stdout).unwrap();
    let overlay =
        said.as_array().unwrap().iter().find(|finding| finding["id"] == "overlay").unwrap();
    assert_eq!(overlay["level"], "fail", "{said}");
    assert!(overlay["fix"].is_string());
}

/// What the probe says of a folder, after a shell has prepared it in a mount table of its own.
fn probed(folder: &Path, prepare: &str) -> serde_json::Value {
    let script = format!("{prepare} && exec \"$0\" --probe \"$1\"");
    let output = HostCommand::new("unshare")
        .args(["--mount", "sh", "-c", &script, env!("CARGO_BIN_EXE_harvest-zygote")])
        .arg(folder)
        .output()
        .unwrap();
    serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"))
}

#[test]
fn a_home_on_a_file_system_that_maps_no_ids_is_found_out() {
    let folder = tempfile::tempdir().unwrap();
    for (prepare, level) in [("true", "ok"), ("mount -t ramfs none \"$1\"", "fail")] {
        let said = probed(folder.path(), prepare);
        let finding =
            said.as_array().unwrap().iter().find(|finding| finding["id"] == "id_mapped_mounts");
        assert_eq!(finding.unwrap()["level"], level, "{prepare}: {said}");
    }
}

#[test]
fn a_host_that_cannot_be_tried_is_a_finding_too() {
    let world = World::new();
    for program in ["/nonexistent", "/bin/busybox"] {
        let engine = Engine::open(Config {
            home: world.home.clone(),
            cache: world.folder.path().join("cache"),
            supervisor: "/nonexistent".into(),
            zygote: vec![program.into()],
            driver: Driver::Dir,
            thresholds: Thresholds::NONE,
        })
        .unwrap();
        let findings = engine.probe();
        assert_eq!(finding(&findings, "probe").level, Level::Fail);
        assert_eq!(finding(&findings, "supervisor").level, Level::Fail);
    }
}
