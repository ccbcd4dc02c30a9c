//! Tests of the host checks, on hosts that can and cannot run sandboxes.

use super::*;
use harvest_engine::{Finding, Level, probe::FINDINGS};

fn finding<'a>(findings: &'a [Finding], id: &str) -> &'a Finding {
    findings
        .iter()
        .find(|finding| finding.id == id)
        .unwrap_or_else(|| panic!("no {id} in {findings:?}"))
}

#[test]
fn capable_host_passes_and_probes_leave_nothing() {
    let world = World::new();
    let running = world.start();
    let findings = world.engine.probe();
    let ids: Vec<&str> = findings.iter().map(|finding| finding.id.as_str()).collect();
    assert_eq!(ids, FINDINGS[1..], "each once, in order: {findings:?}");
    let failed: Vec<&Finding> =
        findings.iter().filter(|finding| finding.level == Level::Fail).collect();
    assert!(failed.is_empty(), "{failed:?}");
    assert!(findings.iter().all(|finding| (finding.level == Level::Ok) == finding.fix.is_none()));
    assert_eq!(shell(&running, "echo on").out, "on");
    let leftovers = fs::read_dir(world.home.join("trash")).unwrap().flatten();
    assert!(leftovers.into_iter().all(|entry| !named(&entry.path()).starts_with("probe")));
    for group in world.groups() {
        let beside = fs::read_dir(group.parent().unwrap()).unwrap().flatten();
        // Other tests may probe at the same time: only leftovers of dead processes count.
        let leftovers = beside
            .filter_map(|entry| named(&entry.path()).strip_prefix("harvest-probe-")?.parse().ok());
        assert!(leftovers.into_iter().all(|pid: u32| uid(pid).is_some()));
    }
}

#[test]
fn probe_reports_home_without_layer_support() {
    // Procfs allows no new folders, so the check of layers fails at once.
    let findings = HostCommand::new(env!("CARGO_BIN_EXE_harvest-zygote"))
        .args(["--probe", "/proc/self"])
        .output()
        .unwrap();
    let report: serde_json::Value = serde_json::from_slice(&findings.stdout).unwrap();
    let overlay =
        report.as_array().unwrap().iter().find(|finding| finding["id"] == "overlay").unwrap();
    assert_eq!(overlay["level"], "fail", "{report}");
    assert!(overlay["fix"].is_string());
}

/// The probe's findings for a folder that a shell has prepared in a private mount table.
fn probe_report(folder: &Path, prepare: &str) -> serde_json::Value {
    let script = format!("{prepare} && exec \"$0\" --probe \"$1\"");
    let output = HostCommand::new("unshare")
        .args(["--mount", "sh", "-c", &script, env!("CARGO_BIN_EXE_harvest-zygote")])
        .arg(folder)
        .output()
        .unwrap();
    serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"))
}

#[test]
fn probe_reports_file_system_without_id_mapping() {
    let folder = tempfile::tempdir().unwrap();
    for (prepare, level) in [("true", "ok"), ("mount -t ramfs none \"$1\"", "fail")] {
        let report = probe_report(folder.path(), prepare);
        let finding =
            report.as_array().unwrap().iter().find(|finding| finding["id"] == "id_mapped_mounts");
        assert_eq!(finding.unwrap()["level"], level, "{prepare}: {report}");
    }
}

#[test]
fn failed_probe_is_reported_as_finding() {
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
