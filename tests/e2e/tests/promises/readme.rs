//! The README's commands, with a folder instead of the URL and the scripted model instead of a key.

use harvest_e2e::{Host, Ran};
use serde_json::Value;

use crate::SAMPLE;

const FIX: &str = r#"make the failing test pass
script: [{"edit": {"path": "/workspace/calc/calc.py", "old": "a - b", "new": "a + b"}},
         {"bash": "python3 -B -m unittest -q && git commit -qam 'Add' && git push -q"},
         {"text": "The test passes."}]"#;

fn well(ran: Ran, wanted: &str) -> Ran {
    assert!(
        ran.code == 0 && format!("{}{}", ran.stdout, ran.stderr).contains(wanted),
        "no `{wanted}` in {ran:?}"
    );
    ran
}

#[tokio::test]
async fn readme_commands_work_in_order() {
    let host = Host::start().await;
    host.repository("calc", SAMPLE).await;
    let run = host.harvest(["run", "-r", "calc", "-m", "scripted", "--net", "none", FIX]);
    let run = well(run, "The test passes.");
    assert!(run.stderr.contains("Check passed"), "`run` stays for the evidence: {run:?}");
    // `-f` returns at the end of the turn; `attach` would not.
    well(
        host.harvest(["send", "-f", "-", "and say so\nscript: [{\"text\": \"It passes.\"}]"]),
        "It passes.",
    );
    well(host.harvest(["diff", "-"]), "+    return a + b");
    well(host.harvest(["pr", "show", "-"]), "passed");
    well(host.harvest(["logs", "-"]), "The test passes.");
    well(host.harvest(["queue", "ls", "-"]), "completed");
    well(host.harvest(["ls"]), "calc");
    well(host.harvest(["pause", "-"]), "snp_");
    well(host.harvest(["resume", "-"]), "");
    well(host.harvest(["fork", "-@1"]), "ses_");
    well(host.harvest(["sandbox", "plan"]), "seccomp");
    well(host.harvest(["doctor"]), "kernel");
    well(host.harvest(Vec::<&str>::new()), "harvest");
}

#[tokio::test]
async fn readme_sandbox_commands_work() {
    let host = Host::start().await;
    well(host.harvest(["exec", "--code", "print(6 * 7)", "--lang", "python"]), "42\n");
    let created = well(host.harvest(["sandbox", "create"]), "sbx_");
    let sandbox = created.stdout.trim();
    well(host.harvest(["exec", sandbox, "--", "sh", "-c", "echo hello > /workspace/note"]), "");
    let note = host.home().join("note");
    let (from, to) = (format!("{sandbox}:/workspace/note"), note.display().to_string());
    well(host.harvest(["sandbox", "cp", &from, &to]), "");
    assert_eq!(std::fs::read_to_string(note).unwrap(), "hello\n");
    well(host.harvest(["sandbox", "snapshot", sandbox]), "snp_");
    well(host.harvest(["sandbox", "fork", sandbox]), "sbx_");
    well(host.harvest(["volume", "create", "data", "--size", "256m"]), "data");
    let volume = ["exec", "--volume", "data:/data", "--", "sh", "-c", "df /data | tail -1"];
    well(host.harvest(volume), "/data");
    well(host.harvest(["df"]), "volume");
    well(host.harvest(["sandbox", "rm", "--all", "--yes"]), "");
}

#[tokio::test]
async fn every_listing_is_json_on_request() {
    let host = Host::start().await;
    host.repository("calc", SAMPLE).await;
    well(
        host.harvest(["run", "-d", "-r", "calc", "-m", "scripted", "--net", "none", "begin"]),
        "ses_",
    );
    for verb in [
        &["ls"][..],
        &["show", "-"],
        &["queue", "ls", "-"],
        &["repo", "ls"],
        &["secret", "ls"],
        &["image", "ls"],
        &["doctor"],
        &["sandbox", "plan"],
        &["sandbox", "ls"],
        &["snapshot", "ls"],
        &["volume", "ls"],
        &["df"],
        &["gc", "--dry-run"],
    ] {
        let ran = host.harvest(verb.iter().chain(&["--json"]));
        let parsed = serde_json::from_str::<Value>(&ran.stdout);
        assert!(ran.code == 0 && parsed.is_ok(), "{verb:?}: {ran:?}");
    }
}
