//! What programs of the base image find inside a sandbox (`docs/inside-a-sandbox.md`).

use harvest_e2e::Host;

fn exec(host: &Host, script: &str) -> (i32, String, String) {
    let arguments = ["exec", "--image", "claude", "--no-state", "--memory", "1g", "--"];
    let ran = host.harvest(arguments.into_iter().chain(["sh", "-c", script]));
    (ran.code, ran.stdout, ran.stderr)
}

#[tokio::test]
async fn ping_says_why_it_fails() {
    let host = Host::start().await;
    for target in ["example.com", "192.0.2.1", "-c 1 localhost"] {
        let (code, _, stderr) = exec(&host, &format!("ping {target}"));
        assert_eq!(code, 2, "{stderr}");
        assert!(stderr.contains("ICMP does not leave a sandbox"), "{stderr}");
        assert!(stderr.contains("curl -I https://NAME"), "{stderr}");
    }
}

// Java's packages link manual pages into this folder, and their installation fails without it.
#[tokio::test]
async fn packages_can_link_manual_pages() {
    let host = Host::start().await;
    assert_eq!(exec(&host, "ls -d /usr/share/man/man1").0, 0);
}

#[tokio::test]
async fn free_shows_memory_a_program_takes() {
    let host = Host::start().await;
    // The program waits until the numbers have changed, then prints what `free` shows.
    let script = r#"exec python3 -c '
import subprocess, time
def used():
    return int(subprocess.check_output(["free", "-m"]).split()[8])
before, taken = used(), bytearray(b"x") * (200 << 20)
while used() < before + 150: time.sleep(0.05)
print(used() - before)
'"#;
    let (code, stdout, stderr) = exec(&host, script);
    assert_eq!(code, 0, "{stderr}");
    let taken: u64 = stdout.trim().parse().unwrap();
    assert!((190..=260).contains(&taken), "{taken}");
}
