//! The names that sandboxes with the network policy `trusted` may reach: the defaults of the common
//! package clients, the registries that this machine's own clients are configured to use, and the
//! names of the setting `trusted`. Runs short commands; connects to nothing.
//!
//! | tool | source on this machine |
//! |---|---|
//! | apt | `sources.list` and `sources.list.d` |
//! | npm | `npm config get registry` |
//! | pip | `PIP_INDEX_URL`, `PIP_EXTRA_INDEX_URL`, `pip config list` |
//! | cargo | `config.toml`, and the `config.json` of each index in its home |
//! | go | `go env GOPROXY GOSUMDB` |
//!
//! Git hosts and model services are never among the names that are found: they have doors of their
//! own, which check what passes. Only the setting can add one.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use harvest_proto::api::{AllowedName, NameSource};

use crate::policy;

// Interpreters start slowly on a loaded machine; a tool that takes longer is skipped.
const TOOL_TIMEOUT: Duration = Duration::from_secs(20);

/// The hosts of indexes and files that each package client uses unless configured otherwise.
/// Hosts that serve any user's files, such as `storage.googleapis.com`, are left out.
const BUILT_IN: [(&str, &[&str]); 17] = [
    ("pip", &["pypi.org", "files.pythonhosted.org"]),
    ("conda", &["conda.anaconda.org", "repo.anaconda.com"]),
    ("npm", &["registry.npmjs.org", "registry.yarnpkg.com", "repo.yarnpkg.com", "nodejs.org"]),
    ("deno", &["jsr.io", "npm.jsr.io"]),
    ("cargo", &["index.crates.io", "static.crates.io", "crates.io", "static.rust-lang.org"]),
    ("go", &["proxy.golang.org", "sum.golang.org"]),
    ("debian", &["deb.debian.org", "security.debian.org"]),
    ("ubuntu", &["archive.ubuntu.com", "security.ubuntu.com", "ports.ubuntu.com"]),
    ("alpine", &["dl-cdn.alpinelinux.org"]),
    ("ruby", &["rubygems.org", "index.rubygems.org"]),
    ("maven", &["repo.maven.apache.org", "repo1.maven.org"]),
    ("gradle", &["plugins.gradle.org", "plugins-artifacts.gradle.org", "services.gradle.org"]),
    ("nuget", &["api.nuget.org"]),
    ("composer", &["repo.packagist.org", "packagist.org"]),
    ("hex", &["repo.hex.pm", "hex.pm", "builds.hex.pm"]),
    ("pub", &["pub.dev"]),
    ("cran", &["cran.r-project.org", "cloud.r-project.org"]),
];

/// Git hosts and model services, which a client of this machine may be configured with.
const NEVER_FOUND: [&str; 11] = [
    "github.com",
    "api.github.com",
    "codeload.github.com",
    "raw.githubusercontent.com",
    "gitlab.com",
    "bitbucket.org",
    "codeberg.org",
    "git.sr.ht",
    "api.anthropic.com",
    "api.openai.com",
    "generativelanguage.googleapis.com",
];

/// The effective list: built-in names, then `host`'s, then those of the setting. A name is listed
/// once, with its first source and all its ports.
#[must_use]
pub fn trusted_names(host: Vec<AllowedName>, configured: &[String]) -> Vec<AllowedName> {
    let built_in = BUILT_IN.iter().flat_map(|(tool, names)| {
        names.iter().map(|name| AllowedName {
            name: (*name).to_owned(),
            source: NameSource::BuiltIn,
            tool: Some((*tool).to_owned()),
            ports: Vec::new(),
        })
    });
    let configured = configured.iter().filter_map(|entry| {
        let name = policy::normalize_entry(entry);
        if name.is_none() {
            tracing::warn!(entry, "an entry of the setting `trusted` is not a host name; ignored");
        }
        name.map(|name| AllowedName {
            name,
            source: NameSource::Config,
            tool: None,
            ports: Vec::new(),
        })
    });
    let mut all: Vec<AllowedName> = Vec::new();
    for mut allowed in built_in.chain(host).chain(configured) {
        match all.iter_mut().find(|known| known.name == allowed.name) {
            Some(known) => {
                allowed.ports.retain(|port| !known.ports.contains(port));
                known.ports.extend(allowed.ports);
            }
            None => all.push(allowed),
        }
    }
    all
}

/// The registries in configuration files that are read without running a tool.
#[must_use]
pub fn file_registries() -> Vec<AllowedName> {
    [("apt", apt()), ("cargo", cargo())]
        .iter()
        .flat_map(|(tool, text)| registries_in(tool, text))
        .collect()
}

/// The registries that this machine's package clients are configured to use. Blocks while the
/// tools run.
#[must_use]
pub fn host_registries() -> Vec<AllowedName> {
    let tools: [(_, fn() -> _); 3] = [("npm", npm), ("pip", pip), ("go", go)];
    let outputs = thread::scope(|scope| {
        let running = tools.map(|(tool, read)| (tool, scope.spawn(read)));
        running.map(|(tool, thread)| (tool, thread.join().unwrap_or_default()))
    });
    let of_tools = outputs.into_iter().flat_map(|(tool, text)| registries_in(tool, &text));
    file_registries().into_iter().chain(of_tools).collect()
}

/// The registries in a text of the host's configuration of a package client.
#[must_use]
pub fn registries_in(tool: &str, text: &str) -> Vec<AllowedName> {
    let found = |(name, port): (String, Option<u16>)| AllowedName {
        name,
        source: NameSource::Host,
        tool: Some(tool.to_owned()),
        ports: port.into_iter().collect(),
    };
    hosts(text).into_iter().map(found).collect()
}

/// Hosts of all http and https URLs in a text, and their ports if unusual. Without addresses,
/// single labels, git hosts and model services.
fn hosts(text: &str) -> Vec<(String, Option<u16>)> {
    let separators = |c: char| c.is_whitespace() || "\"'`,()[]<>|".contains(c);
    text.split(separators)
        .filter_map(|word| word.find("http").map(|at| &word[at..]))
        .filter_map(|url| url.strip_prefix("http://").or_else(|| url.strip_prefix("https://")))
        .filter_map(|rest| {
            let authority = rest.split(['/', '?', '#']).next().unwrap_or(rest);
            let host = authority.rsplit('@').next().unwrap_or(authority);
            let (host, port) = host.split_once(':').unwrap_or((host, ""));
            let port = port.parse().ok().filter(|port| ![80, 443].contains(port));
            policy::normalize(host).map(|name| (name, port))
        })
        .filter(|(name, _)| name.contains('.') && !NEVER_FOUND.contains(&name.as_str()))
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
    format!(
        "{}\n{}\n{}",
        set("PIP_INDEX_URL"),
        set("PIP_EXTRA_INDEX_URL"),
        index_lines(&run("pip", &["config", "list"]))
    )
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
        // Package clients also read the settings of a project in the working directory.
        .current_dir("/")
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
        let found = |name: &str, port| (name.to_owned(), port);
        assert_eq!(
            hosts(text),
            [
                found("mirror.example.org", None),
                found("packages.example.net", Some(8443)),
                found("index.example.com", None)
            ]
        );
    }

    #[test]
    fn commented_lines_are_ignored() {
        assert_eq!(
            hosts(&without_comments("# http://old.example.org\nhttp://new.example.org")),
            [("new.example.org".to_owned(), None)]
        );
    }

    #[test]
    fn only_index_lines_of_pip_count() {
        let list = "global.index-url='https://a.example.org/simple'\nglobal.proxy='http://b.example.org'\n";
        assert_eq!(hosts(&index_lines(list)), [("a.example.org".to_owned(), None)]);
    }

    #[test]
    fn projects_npmrc_names_no_registry() {
        assert_ne!(env::current_dir().unwrap(), Path::new("/"));
        assert_eq!(run("pwd", &["-P"]), "/\n", "a project's `.npmrc` would be read elsewhere");
    }

    #[test]
    fn registries_of_this_machine_are_valid_names() {
        for AllowedName { name, .. } in host_registries() {
            assert_eq!(policy::normalize(&name), Some(name.clone()));
        }
    }

    #[test]
    fn index_and_file_hosts_are_built_in() {
        let names: Vec<_> = trusted_names(vec![], &[]).into_iter().map(|one| one.name).collect();
        for name in [
            "pypi.org",
            "files.pythonhosted.org",
            "registry.npmjs.org",
            "index.crates.io",
            "static.crates.io",
            "proxy.golang.org",
            "deb.debian.org",
        ] {
            assert!(names.iter().any(|known| known == name), "{name}");
        }
        for name in names {
            assert_eq!(policy::normalize(&name), Some(name.clone()));
            assert!(!NEVER_FOUND.contains(&name.as_str()), "{name}");
        }
    }

    #[test]
    fn setting_adds_names_and_repeats_none() {
        let mirror = AllowedName {
            name: "mirror.example.org".to_owned(),
            source: NameSource::Host,
            tool: Some("pip".to_owned()),
            ports: vec![8443],
        };
        let setting = ["*.Corp.example", "pypi.org", "*", "10.0.0.1", "mirror.example.org"];
        let all = trusted_names(vec![mirror.clone()], &setting.map(str::to_owned));
        let added: Vec<_> = all.iter().filter(|one| one.source != NameSource::BuiltIn).collect();
        let corp = AllowedName {
            name: "*.corp.example".to_owned(),
            source: NameSource::Config,
            tool: None,
            ports: Vec::new(),
        };
        assert_eq!(added, [&mirror, &corp]);
    }

    #[test]
    fn git_and_model_hosts_are_never_found() {
        let text = "registry = \"https://github.com/rust-lang/crates.io-index\" https://GitLab.com/x \
                    https://npm.pkg.github.com/ https://api.anthropic.com/";
        assert_eq!(hosts(text), [("npm.pkg.github.com".to_owned(), None)]);
    }
}
