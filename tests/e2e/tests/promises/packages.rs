//! What `make dist` makes of a built program: the same bytes twice, an installation in a fresh
//! Debian, a unit that systemd accepts, and alert rules that Prometheus accepts. The debug program
//! stands for the release one.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use harvest_e2e::{Host, Ran, binary};
use harvest_proto::EventBody;
use serde_json::json;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The packages of the debug program, made in this folder.
fn packages(folder: &Path) -> String {
    let mut dist = Command::new(root().join("packaging/dist"));
    let made = dist.arg(binary("harvest")).arg(folder).output().unwrap();
    assert!(made.status.success(), "{made:?}");
    fs::read_to_string(folder.join("SHA256SUMS")).unwrap()
}

fn output(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    assert!(output.status.success(), "{command:?}: {text}");
    text
}

/// The highest version of glibc among a program's symbols.
fn glibc_of(program: &Path) -> String {
    let symbols = output(Command::new("objdump").arg("-T").arg(program));
    let parts = symbols.split(['(', ')', ' ']).filter_map(|part| part.strip_prefix("GLIBC_"));
    let number = |version: &str| -> Option<Vec<u32>> {
        version.split('.').map(|part| part.parse().ok()).collect()
    };
    let highest = parts.filter_map(|part| Some((number(part)?, part))).max();
    highest.expect("the program is linked with glibc").1.to_owned()
}

fn ok(ran: Ran) -> String {
    assert_eq!(ran.code, 0, "{ran:?}");
    ran.stdout.trim().to_owned()
}

/// What the package depends on, and systemd's checker of units.
const BARE: &str = r#"
name = "bare-debian"
from = { debian = "bookworm", include = ["ca-certificates", "e2fsprogs", "git", "systemd"] }
"#;

const TRY_PACKAGE: &str = "set -eu
cd /root
sha256sum --check SHA256SUMS
dpkg -i harvest_*.deb
harvest version
systemd-analyze verify /lib/systemd/system/harvest.service
export HARVEST_HOME=/var/lib/harvest HARVEST_CACHE=/var/cache/harvest HOME=/root
harvest doctor || true
harvest up -d
harvest ls
harvest down
dpkg -r harvest
test ! -e /usr/bin/harvest
test ! -e /lib/systemd/system/harvest.service
test -e /var/lib/harvest/harvest.db
tar -xzf harvest-*.tar.gz
rm -r /var/lib/harvest
harvest-*/bin/harvest up -d
harvest-*/bin/harvest down
";

#[tokio::test]
async fn packages_are_reproducible_and_install_in_fresh_debian() {
    let (host, folder) = (Host::start().await, tempfile::tempdir().unwrap());
    let out = folder.path().join("out");
    let sums = packages(&out);
    assert_eq!(sums.lines().count(), 2, "{sums}");
    assert_eq!(packages(&folder.path().join("again")), sums);
    let deb =
        sums.lines().find_map(|line| line.split_whitespace().find(|name| name.ends_with(".deb")));
    let depends =
        output(Command::new("dpkg-deb").arg("-f").arg(out.join(deb.unwrap())).arg("Depends"));
    let needed = glibc_of(&binary("harvest"));
    assert!(depends.contains(&format!("libc6 (>= {needed}),")), "{depends} for {needed}");

    let recipe = folder.path().join("bare-debian.toml");
    fs::write(&recipe, BARE).unwrap();
    ok(host.harvest(["image", "build", recipe.to_str().unwrap()]));
    let create = ["sandbox", "create", "--image", "bare-debian", "--net", "none"];
    let sandbox = ok(host.harvest(create));
    let named = sums.lines().map(|line| line.split_whitespace().last().unwrap());
    for name in named.chain(["SHA256SUMS"]) {
        let from = out.join(name).display().to_string();
        ok(host.harvest(["cp", &from, &format!("{sandbox}:/root/{name}")]));
    }
    let tried = host.harvest(["exec", "-u", "root", &sandbox, "--", "sh", "-c", TRY_PACKAGE]);
    assert_eq!(tried.code, 0, "{tried:?}");
    assert!(tried.stdout.contains("http://127.0.0.1:7070"), "{tried:?}");
}

#[test]
fn unit_passes_systemd_and_leaves_sandboxes_alone() {
    let folder = tempfile::tempdir().unwrap();
    let text = fs::read_to_string(root().join("packaging/harvest.service")).unwrap();
    let unit = folder.path().join("harvest.service");
    let program = binary("harvest");
    fs::write(&unit, text.replace("/usr/bin/harvest", program.to_str().unwrap())).unwrap();
    let said = output(Command::new("systemd-analyze").arg("verify").arg(&unit));
    assert_eq!(said, "", "no warning");
    let options: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
    for needed in [
        "KillMode=process",
        "Delegate=yes",
        "OOMPolicy=continue",
        "Restart=on-failure",
        "ExecStart=/usr/bin/harvest --quiet up",
    ] {
        assert!(options.contains(&needed), "{needed}");
    }
    // These would reach into sandboxes, or hide the store of an earlier server.
    for harmful in [
        "NoNewPrivileges",
        "UMask",
        "SystemCallFilter",
        "RestrictNamespaces",
        "RestrictSUIDSGID",
        "MemoryDenyWriteExecute",
        "ProtectSystem",
        "PrivateTmp",
        "PrivateMounts",
        "ProtectHome",
    ] {
        assert!(!options.iter().any(|line| line.starts_with(harmful)), "{harmful}");
    }
}

/// The names of metrics in the expressions of the rules.
fn metrics_in(rules: &str) -> Vec<String> {
    let is_part = |letter: char| letter.is_ascii_alphanumeric() || letter == '_';
    let words = rules.split(|letter: char| !is_part(letter));
    let mut names: Vec<String> =
        words.filter(|word| word.starts_with("harvest_")).map(str::to_owned).collect();
    names.sort();
    names.dedup();
    names
}

#[tokio::test]
async fn alert_rules_name_metrics_that_exist() {
    let path = root().join("packaging/alerts.yml");
    let said = output(Command::new("promtool").args(["check", "rules"]).arg(&path));
    assert!(said.contains("SUCCESS: 10 rules found"), "{said}");
    let host = Host::start().await;
    let session = host.bare("Work.", &json!([{ "text": "ok" }])).await.id;
    let kept = |body: &EventBody| matches!(body, EventBody::SnapshotTaken { .. });
    host.follow(session).until("a snapshot", kept).await;
    let page = host.get("/metrics").send().await.unwrap().text().await.unwrap();
    let metrics = metrics_in(&fs::read_to_string(&path).unwrap());
    assert!(metrics.len() >= 8, "{metrics:?}");
    for metric in metrics {
        let has = |line: &str| {
            line.strip_prefix(&metric).is_some_and(|rest| rest.starts_with(['{', ' ']))
        };
        assert!(page.lines().any(has), "{metric} in {page}");
    }
    for label in ["outcome=\"completed\"", "state=\"", "method=\"GET\"", "status=\"2"] {
        assert!(page.contains(label), "{label}");
    }
}
