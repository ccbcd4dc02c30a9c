//! `harvest quickstart` succeeds twice in a row, prints what the README shows, and cleans up.

use std::process::Command;

use harvest_e2e::binary;

use crate::documents::{missing, output_of};

#[test]
fn quickstart_completes_twice_and_cleans_up() {
    let home = tempfile::Builder::new().prefix("hv").tempdir().unwrap();
    let quickstart = |arguments: &[&str]| {
        // Both outputs in one, in the order of a terminal.
        let ran = Command::new("sh")
            .args(["-c", "exec \"$0\" quickstart \"$@\" 2>&1"])
            .arg(binary("harvest"))
            .args(arguments)
            .env("HARVEST_HOME", home.path())
            .env_remove("ANTHROPIC_API_KEY")
            // A machine where git has no identity.
            .env("GIT_CONFIG_GLOBAL", "/dev/null")
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&ran.stdout).into_owned();
        assert!(ran.status.success(), "{text}");
        text
    };
    for _ in 0..2 {
        let text = quickstart(&[]);
        for wanted in
            ["scripted", "return a + b", "Quickstart (Harvest) <quickstart@localhost>", "passed"]
        {
            assert!(text.contains(wanted), "no `{wanted}` in:\n{text}");
        }
        let shown = output_of("README.md", "make run");
        assert_eq!(missing(&shown, &text), None, "the README shows it; printed was:\n{text}");
    }
    quickstart(&["--clean"]);
    let left: Vec<_> =
        std::fs::read_dir(home.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(left.is_empty(), "{left:?}");
}
