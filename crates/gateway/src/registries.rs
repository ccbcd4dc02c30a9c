//! The package registries that this machine is configured to use, as the default list of trusted
//! names. Nothing is built in: the names come from the configuration of the machine's own tools.
//! Runs short commands; connects to nothing.
//!
//! | tool | source |
//! |---|---|
//! | apt | `sources.list` and `sources.list.d` |
//! | npm | `npm config get registry` |
//! | pip | `PIP_INDEX_URL`, `PIP_EXTRA_INDEX_URL`, `pip config list`, else its help |
//! | cargo | `config.toml`, and the `config.json` of each index in its home |
//! | go | `go env GOPROXY GOSUMDB` |
//!
//! A registry may serve files from another name that is in no configuration; users of such a
//! registry add that name to the policy.

use std::{
    collections::BTreeSet,
    env, fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use crate::policy;

// Interpreters start slowly on a loaded machine; a tool that takes longer is skipped.
const TOOL_TIMEOUT: Duration = Duration::from_secs(20);

/// Host names of this machine's package registries, sorted. Blocks while the tools run.
#[must_use]
pub fn host_registries() -> Vec<String> {
    let tools: [fn() -> String; 5] = [apt, npm, pip, cargo, go];
    let outputs = thread::scope(|scope| {
        let running: Vec<_> = tools.into_iter().map(|tool| scope.spawn(tool)).collect();
        running.into_iter().map(|thread| thread.join().unwrap_or_default()).collect::<Vec<_>>()
    });
    let hosts: BTreeSet<_> = outputs.iter().flat_map(|text| hosts(text)).collect();
    hosts.into_iter().collect()
}

/// Hosts of all http and https URLs in a text, without addresses and single labels.
fn hosts(text: &str) -> Vec<String> {
    let separators = |c: char| c.is_whitespace() || "\"'`,()[]<>|".contains(c);
    text.split(separators)
        .filter_map(|word| word.find("http").map(|at| &word[at..]))
        .filter_map(|url| url.strip_prefix("http://").or_else(|| url.strip_prefix("https://")))
        .filter_map(|rest| {
            let authority = rest.split(['/', '?', '#']).next().unwrap_or(rest);
            let host = authority.rsplit('@').next().unwrap_or(authority);
            policy::normalize(host.split(':').next().unwrap_or(host))
        })
        .filter(|name| name.contains('.'))
        .collect()
}

fn apt() -> String {
    let folder = Path::new("/etc/apt");
    let mut files = vec![folder.join("sources.list")];
    files.extend(entries(&folder.join("sources.list.d")));
    files.iter().map(|file| without_comments(&read(file))).collect()
}

fn npm() -> String {
    run("npm", &["config", "get", "registry"])
}

fn pip() -> String {
    let set = |name| env::var(name).unwrap_or_default();
    let configured = format!(
        "{}\n{}\n{}",
        set("PIP_INDEX_URL"),
        set("PIP_EXTRA_INDEX_URL"),
        index_lines(&run("pip", &["config", "list"]))
    );
    if !hosts(&configured).is_empty() {
        return configured;
    }
    // The default is only documented in the help of the option that changes it.
    let help = run("pip", &["install", "--help"]);
    let Some((_, option)) = help.split_once("--index-url <url>") else { return String::new() };
    option.split_once("(default").map_or_else(String::new, |(_, default)| {
        default.split(')').next().unwrap_or_default().to_owned()
    })
}

fn index_lines(list: &str) -> String {
    list.lines().filter(|line| line.contains("index-url")).map(|line| format!("{line}\n")).collect()
}

fn cargo() -> String {
    let home = env::var_os("CARGO_HOME")
        .map(PathBuf::from)
        .or_else(|| env::var_os("HOME").map(|home| Path::new(&home).join(".cargo")));
    let Some(home) = home else { return String::new() };
    let mut text = without_comments(&read(&home.join("config.toml")));
    for index in entries(&home.join("registry/index")) {
        // The folder's name is the host of the index and a hash.
        let name = index.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if let Some((host, _hash)) = name.rsplit_once('-') {
            text.push_str(&format!("\nhttps://{host}/\n"));
        }
        text.push_str(&read(&index.join("config.json")));
    }
    text
}

fn go() -> String {
    let values = run("go", &["env", "GOPROXY", "GOSUMDB"]);
    // The checksum database is a bare name.
    values.split_whitespace().map(|value| format!("{value} https://{value}/\n")).collect()
}

fn without_comments(text: &str) -> String {
    text.lines()
        .filter(|line| !line.trim_start().starts_with('#'))
        .map(|line| format!("{line}\n"))
        .collect()
}

fn read(path: &Path) -> String {
    fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    entries.filter_map(Result::ok).map(|entry| entry.path()).collect()
}

fn run(program: &str, arguments: &[&str]) -> String {
    let spawned = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn();
    let Ok(mut child) = spawned else { return String::new() };
    let deadline = Instant::now() + TOOL_TIMEOUT;
    // The output is shorter than a pipe's capacity, so it can be read after the exit.
    while Instant::now() < deadline {
        match child.try_wait() {
            Ok(Some(status)) if status.success() => {
                let output =
                    child.wait_with_output().map(|output| output.stdout).unwrap_or_default();
                return String::from_utf8_lossy(&output).into_owned();
            }
            Ok(None) => thread::sleep(Duration::from_millis(10)),
            Ok(Some(_)) | Err(_) => return String::new(),
        }
    }
    tracing::warn!(program, "timed out while reading its package registries");
    // Reaps the process, also when it has just exited by itself.
    let _ = child.kill();
    let _ = child.wait();
    String::new()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_of_all_urls_are_found() {
        let text = "deb [arch=amd64] http://Mirror.example.org/debian stable main\n\
                    URIs: https://user:pw@packages.example.net:8443/x http://10.0.0.1/ http://localhost/\n\
                    index = \"sparse+https://index.example.com/\" mirror+file:/etc/x";
        assert_eq!(
            hosts(text),
            ["mirror.example.org", "packages.example.net", "index.example.com"]
        );
    }

    #[test]
    fn commented_lines_are_ignored() {
        assert_eq!(
            hosts(&without_comments("# http://old.example.org\nhttp://new.example.org")),
            ["new.example.org"]
        );
    }

    #[test]
    fn only_index_lines_of_pip_count() {
        let list = "global.index-url='https://a.example.org/simple'\nglobal.proxy='http://b.example.org'\n";
        assert_eq!(hosts(&index_lines(list)), ["a.example.org"]);
    }

    #[test]
    fn registries_of_this_machine_are_valid_names() {
        for host in host_registries() {
            assert_eq!(policy::normalize(&host), Some(host.clone()));
        }
    }
}
