//! What a build takes over from this host so that packages can be fetched: proxies, certificates,
//! mirrors, registries. It is shown to steps in one read-only folder and in variables; none of it
//! stays in an image. Names no mirror and no registry itself.

use std::{
    collections::BTreeMap,
    env, fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
};

use harvest_proto::redact::Redaction;

use super::passwords;
use crate::{
    EngineError,
    disk::{self, disk_error},
    spec::Bind,
};

/// Where steps see the folder.
const INSIDE: &str = "/run/harvest";

// Programs read the bundle's place from whichever of these they know.
const CA_VARIABLES: [&str; 7] = [
    "SSL_CERT_FILE",
    "NODE_EXTRA_CA_CERTS",
    "REQUESTS_CA_BUNDLE",
    "PIP_CERT",
    "CURL_CA_BUNDLE",
    "GIT_SSL_CAINFO",
    "npm_config_cafile",
];

const PROXY_VARIABLES: [&str; 5] =
    ["http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy"];

// What tells pip where to fetch; the rest of its settings is about the host's own disk.
const PIP_KEYS: [&str; 8] = [
    "index-url",
    "extra-index-url",
    "trusted-host",
    "proxy",
    "timeout",
    "default-timeout",
    "retries",
    "no-index",
];

// npm settings that are about the host's own disk.
const NPM_LEFT_OUT: [&str; 10] = [
    "cafile",
    "ca",
    "cache",
    "prefix",
    "nodedir",
    "userconfig",
    "globalconfig",
    "tmp",
    "shell",
    "script-shell",
];

// What apt's settings are about when they are about fetching.
const APT_KEPT: [&str; 9] = [
    "Acquire::http::",
    "Acquire::https::",
    "Acquire::ftp::",
    "Acquire::Retries",
    "Acquire::Check-Valid-Until",
    "Acquire::Max-ValidTime",
    "Acquire::ForceIPv4",
    "Acquire::ForceIPv6",
    "Acquire::Queue-Mode",
];

/// The host's configuration, laid out for the steps of one build.
#[derive(Debug)]
pub(crate) struct HostFolder {
    path: PathBuf,
    /// Variables for every step.
    pub(crate) env: BTreeMap<String, String>,
    /// What of it nobody may read in what a step says.
    pub(crate) redaction: Redaction,
    sources: bool,
}

impl HostFolder {
    /// Writes the folder at `path`. `suite` is the Debian the image consists of, if it is one.
    pub(crate) fn make(path: PathBuf, suite: Option<&str>) -> Result<Self, EngineError> {
        fs::create_dir(&path).map_err(|e| disk_error("create", &path, e))?;
        // Readable for the ids of a sandbox; the folders above keep everyone else out.
        let readable = fs::Permissions::from_mode(0o755);
        fs::set_permissions(&path, readable).map_err(|e| disk_error("create", &path, e))?;
        let mut folder =
            Self { path, env: BTreeMap::new(), redaction: Redaction::new(), sources: false };
        folder.certificates()?;
        folder.apt(suite)?;
        folder.npm()?;
        folder.env.extend(pip_variables(&pip_files(), env::vars()));
        folder.env.extend(uv_variables(&folder.env));
        folder.env.extend(proxy_variables(env::vars()));
        for (name, value) in &folder.env {
            passwords::learn_npm(&mut folder.redaction, &format!("{name}={value}"));
        }
        Ok(folder)
    }

    /// What a step's sandbox gets to see. `has_sources`: the image keeps Debian sources where we do.
    pub(crate) fn binds(&self, has_sources: bool) -> Vec<Bind> {
        let mut binds = vec![Bind { source: self.path.clone(), inside: INSIDE.into() }];
        if self.sources && has_sources {
            let inside = Path::new("/").join(crate::bootstrap::SOURCES);
            binds.push(Bind { source: self.path.join("debian.sources"), inside });
        }
        binds
    }

    fn put(&self, name: &str, text: &[u8]) -> Result<(), EngineError> {
        let path = self.path.join(name);
        fs::write(&path, text)
            .and_then(|()| fs::set_permissions(&path, fs::Permissions::from_mode(0o644)))
            .map_err(|e| disk_error("write", path, e))
    }

    fn certificates(&mut self) -> Result<(), EngineError> {
        let default = || PathBuf::from("/etc/ssl/certs/ca-certificates.crt");
        let bundle = env::var_os("SSL_CERT_FILE").map_or_else(default, PathBuf::from);
        // A host without one has nothing to add to what the image brings.
        let Ok(bytes) = fs::read(&bundle) else { return Ok(()) };
        self.put("ca.pem", &bytes)?;
        self.env.extend(CA_VARIABLES.map(|name| (name.to_owned(), format!("{INSIDE}/ca.pem"))));
        Ok(())
    }

    fn apt(&mut self, suite: Option<&str>) -> Result<(), EngineError> {
        let mut settings = apt_settings();
        // Fetching as another user inside needs folders that user can read; root is what steps are.
        settings.push("APT::Sandbox::User \"root\";".to_owned());
        settings.push("Acquire::Languages \"none\";".to_owned());
        if self.env.contains_key("SSL_CERT_FILE") {
            settings.push(format!("Acquire::https::CaInfo \"{INSIDE}/ca.pem\";"));
        }
        settings.iter().for_each(|setting| passwords::learn(&mut self.redaction, setting));
        self.put("apt.conf", (settings.join("\n") + "\n").as_bytes())?;
        self.env.insert("APT_CONFIG".to_owned(), format!("{INSIDE}/apt.conf"));
        if let Some(sources) = suite.map(debian_sources).filter(|sources| !sources.is_empty()) {
            self.put("debian.sources", render_sources(&sources, false).as_bytes())?;
            self.sources = true;
        }
        Ok(())
    }

    fn npm(&mut self) -> Result<(), EngineError> {
        let home = env::var_os("HOME").map(PathBuf::from).unwrap_or_default();
        let user =
            env::var_os("NPM_CONFIG_USERCONFIG").map_or_else(|| home.join(".npmrc"), PathBuf::from);
        let mut lines = String::new();
        for file in [Path::new("/etc/npmrc"), Path::new("/usr/etc/npmrc"), &user] {
            lines += &npm_lines(&fs::read_to_string(file).unwrap_or_default());
        }
        passwords::learn_npm(&mut self.redaction, &lines);
        self.put("npmrc", lines.as_bytes())?;
        self.env.insert("npm_config_userconfig".to_owned(), format!("{INSIDE}/npmrc"));
        for (name, value) in env::vars() {
            let key = name.to_ascii_lowercase();
            let Some(setting) = key.strip_prefix("npm_config_") else { continue };
            if !NPM_LEFT_OUT.contains(&setting.replace('_', "-").as_str()) {
                self.env.insert(key, value);
            }
        }
        Ok(())
    }
}

impl Drop for HostFolder {
    fn drop(&mut self) {
        // Ours and small; a leftover is collected with the rest of what was being built.
        let _ = fs::remove_dir_all(&self.path);
    }
}

// uv reads none of pip's settings; where to fetch from is the same.
fn uv_variables(known: &BTreeMap<String, String>) -> BTreeMap<String, String> {
    let same = [("PIP_INDEX_URL", "UV_DEFAULT_INDEX"), ("PIP_EXTRA_INDEX_URL", "UV_INDEX")];
    let pair = |(pip, uv): (&str, &str)| Some((uv.to_owned(), known.get(pip)?.clone()));
    same.into_iter().filter_map(pair).collect()
}

fn npm_lines(text: &str) -> String {
    let kept = |line: &&str| {
        let key = line.split('=').next().unwrap_or_default().trim();
        !NPM_LEFT_OUT.contains(&key)
    };
    text.lines().filter(kept).map(|line| format!("{line}\n")).collect()
}

fn proxy_variables(all: impl Iterator<Item = (String, String)>) -> BTreeMap<String, String> {
    all.filter(|(name, _)| PROXY_VARIABLES.contains(&name.to_ascii_lowercase().as_str())).collect()
}

fn pip_files() -> Vec<String> {
    let home = env::var_os("HOME").map(PathBuf::from).unwrap_or_default();
    let mut paths = vec![
        PathBuf::from("/etc/pip.conf"),
        home.join(".pip/pip.conf"),
        home.join(".config/pip/pip.conf"),
    ];
    paths.extend(env::var_os("PIP_CONFIG_FILE").map(PathBuf::from));
    paths.iter().filter_map(|path| fs::read_to_string(path).ok()).collect()
}

// Later files win over earlier ones, variables over files, as in pip itself.
fn pip_variables(
    files: &[String],
    all: impl Iterator<Item = (String, String)>,
) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    let variable = |key: &str| format!("PIP_{}", key.to_ascii_uppercase().replace('-', "_"));
    for text in files {
        let (mut wanted, mut last) = (false, None);
        for line in text.lines().filter(|line| !line.trim_start().starts_with(['#', ';'])) {
            if let Some(section) =
                line.trim().strip_prefix('[').and_then(|rest| rest.strip_suffix(']'))
            {
                wanted = matches!(section, "global" | "install");
                last = None;
            } else if line.starts_with([' ', '\t']) {
                if let Some(value) = last.as_ref().and_then(|name| found.get_mut(name)) {
                    let value: &mut String = value;
                    *value = format!("{value} {}", line.trim()).trim().to_owned();
                }
            } else if let Some((key, value)) = line.split_once(['=', ':']) {
                last = (wanted && PIP_KEYS.contains(&key.trim())).then(|| variable(key.trim()));
                found.extend(last.clone().map(|name| (name, value.trim().to_owned())));
            }
        }
    }
    let known: Vec<String> = PIP_KEYS.iter().map(|key| variable(key)).collect();
    found.extend(all.filter(|(name, _)| known.contains(name)));
    found
}

/// The host's apt settings that are about fetching, as lines of an apt configuration.
pub(crate) fn apt_settings() -> Vec<String> {
    let dump = Command::new("apt-config").arg("dump").output();
    // A host without apt has nothing to add.
    dump.map_or_else(|_| Vec::new(), |dump| kept_settings(&String::from_utf8_lossy(&dump.stdout)))
}

fn kept_settings(dump: &str) -> Vec<String> {
    // Files and programs of the host mean nothing inside.
    let foreign = ["CaInfo", "CaPath", "SslCert", "SslKey", "AutoDetect", "Auto-Detect"];
    let kept = |line: &&str| {
        APT_KEPT.iter().any(|prefix| line.starts_with(prefix))
            && !foreign
                .iter()
                .any(|word| line.to_ascii_lowercase().contains(&word.to_ascii_lowercase()))
            && !line.ends_with("\"\";")
    };
    dump.lines().filter(kept).map(str::to_owned).collect()
}

/// One place packages of a Debian come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Source {
    uris: Vec<String>,
    suites: Vec<String>,
    components: Vec<String>,
    signed_by: Option<String>,
}

/// Where this host gets the packages of a Debian suite; empty when its sources name none.
pub(crate) fn debian_sources(suite: &str) -> Vec<Source> {
    let parts = Path::new("/etc/apt/sources.list.d");
    let mut all = parse_list(&fs::read_to_string("/etc/apt/sources.list").unwrap_or_default());
    for name in disk::names_in(parts).unwrap_or_default() {
        let text = fs::read_to_string(parts.join(&name)).unwrap_or_default();
        match name.rsplit('.').next() {
            Some("list") => all.extend(parse_list(&text)),
            Some("sources") => all.extend(parse_deb822(&text)),
            _ => {}
        }
    }
    let os = fs::read_to_string("/etc/os-release").unwrap_or_default();
    let field = |key: &str| {
        os.lines()
            .find_map(|line| line.strip_prefix(key)?.strip_prefix('='))
            .map(|value| value.trim_matches('"'))
    };
    let own = field("VERSION_CODENAME").filter(|_| field("ID") == Some("debian"));
    choose_sources(&all, suite, own)
}

fn choose_sources(all: &[Source], suite: &str, own: Option<&str>) -> Vec<Source> {
    let chosen = of_suite(all, suite);
    match own {
        // A mirror of one Debian carries the others too.
        Some(own) if chosen.is_empty() => of_suite(all, own)
            .into_iter()
            .map(|mut source| {
                for name in &mut source.suites {
                    *name = name.replacen(own, suite, 1);
                }
                source
            })
            .collect(),
        _ => chosen,
    }
}

fn of_suite(all: &[Source], suite: &str) -> Vec<Source> {
    let wanted = [suite.to_owned(), format!("{suite}-updates"), format!("{suite}-security")];
    let mut chosen = Vec::new();
    for source in all.iter().filter(|source| is_debians(source)) {
        let suites: Vec<_> =
            source.suites.iter().filter(|name| wanted.contains(name)).cloned().collect();
        if !suites.is_empty() {
            chosen.push(Source { suites, ..source.clone() });
        }
    }
    chosen
}

// Others call their suites after Debian's too; they sign with another key and lie elsewhere.
fn is_debians(source: &Source) -> bool {
    let place = |uri: &String| {
        let last = uri.trim_end_matches('/').rsplit('/').next().unwrap_or_default();
        matches!(last, "debian" | "debian-security")
    };
    source.components.iter().any(|component| component == "main")
        && match &source.signed_by {
            Some(key) => Path::new(key)
                .file_name()
                .is_some_and(|name| name.to_string_lossy().starts_with("debian-archive")),
            None => source.uris.iter().all(place),
        }
}

fn parse_list(text: &str) -> Vec<Source> {
    text.lines().filter_map(parse_list_line).collect()
}

fn parse_list_line(line: &str) -> Option<Source> {
    let line = line.split('#').next()?.trim();
    let mut rest = line.strip_prefix("deb")?.strip_prefix([' ', '\t'])?.trim_start();
    let mut signed_by = None;
    if let Some(options) = rest.strip_prefix('[') {
        let (options, tail) = options.split_once(']')?;
        signed_by = options
            .split_whitespace()
            .find_map(|option| option.strip_prefix("signed-by="))
            .map(str::to_owned);
        rest = tail;
    }
    let mut words = rest.split_whitespace().map(str::to_owned);
    let (uri, suite) = (words.next()?, words.next()?);
    Some(Source { uris: vec![uri], suites: vec![suite], components: words.collect(), signed_by })
}

fn parse_deb822(text: &str) -> Vec<Source> {
    let text: String = text
        .lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| format!("{line}\n"))
        .collect();
    text.split("\n\n").filter_map(parse_stanza).collect()
}

fn parse_stanza(stanza: &str) -> Option<Source> {
    let mut fields: BTreeMap<String, String> = BTreeMap::new();
    let mut last = String::new();
    for line in stanza.lines() {
        if line.starts_with([' ', '\t']) {
            let value = fields.entry(last.clone()).or_default();
            *value = format!("{value} {}", line.trim());
        } else if let Some((key, value)) = line.split_once(':') {
            last = key.trim().to_ascii_lowercase();
            fields.insert(last.clone(), value.trim().to_owned());
        }
    }
    let words = |key: &str| -> Vec<String> {
        fields
            .get(key)
            .map(|value| value.split_whitespace().map(str::to_owned).collect())
            .unwrap_or_default()
    };
    let off =
        fields.get("enabled").is_some_and(|value| matches!(value.as_str(), "no" | "false" | "0"));
    if off || !words("types").iter().any(|kind| kind == "deb") {
        return None;
    }
    // A key in the stanza itself, over several lines, is nobody's file.
    let signed_by = fields.get("signed-by").cloned();
    Some(Source {
        uris: words("uris"),
        suites: words("suites"),
        components: words("components"),
        signed_by,
    })
}

/// Sources as apt reads them. `keys`: with the host's key files, which an image need not have; without
/// them Debian's own keys, which every Debian has, are used.
pub(crate) fn render_sources(sources: &[Source], keys: bool) -> String {
    let render = |source: &Source| {
        let mut text = format!(
            "Types: deb\nURIs: {}\nSuites: {}\nComponents: {}\n",
            source.uris.join(" "),
            source.suites.join(" "),
            source.components.join(" ")
        );
        if let Some(key) = source.signed_by.as_ref().filter(|_| keys) {
            text += &format!("Signed-By: {key}\n");
        }
        text
    };
    sources.iter().map(render).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEB822: &str = "Types: deb deb-src\n# a comment\nURIs: http://mirror.test/debian\n\
        Suites: bookworm bookworm-updates bookworm-backports\nComponents: main contrib\n\
        Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg\n\n\
        Types: deb\nURIs: http://mirror.test/debian-security\nSuites: bookworm-security\nComponents: main\n\n\
        Types: deb\nURIs: https://vendor.test/apt\nSuites: bookworm\nComponents: main\n\
        Signed-By: /usr/share/keyrings/vendor.gpg\n\n\
        Types: deb\nEnabled: no\nURIs: http://old.test/debian\nSuites: bookworm\nComponents: main\n";

    #[test]
    fn only_debians_own_sources_of_the_wanted_suite_are_taken_over() {
        let chosen = choose_sources(&parse_deb822(DEB822), "bookworm", Some("bookworm"));
        let text = render_sources(&chosen, false);
        assert_eq!(
            text,
            "Types: deb\nURIs: http://mirror.test/debian\nSuites: bookworm bookworm-updates\nComponents: main contrib\n\n\
             Types: deb\nURIs: http://mirror.test/debian-security\nSuites: bookworm-security\nComponents: main\n"
        );
        assert!(
            render_sources(&chosen, true).contains("Signed-By: /usr/share/keyrings/debian-archive")
        );
    }

    #[test]
    fn one_line_sources_are_understood() {
        let list = "# deb http://no.test/debian bookworm main\n\
            deb [arch=amd64 signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://a.test/debian bookworm main\n\
            deb-src http://a.test/debian bookworm main\n\
            deb https://vendor.test/linux/debian bookworm stable\n";
        let chosen = choose_sources(&parse_list(list), "bookworm", None);
        assert_eq!(chosen.len(), 1);
        assert_eq!(chosen[0].uris, ["http://a.test/debian"]);
    }

    #[test]
    fn a_debian_of_another_suite_lends_its_mirror() {
        let chosen = choose_sources(&parse_deb822(DEB822), "trixie", Some("bookworm"));
        let suites: Vec<_> = chosen.iter().flat_map(|source| source.suites.clone()).collect();
        assert_eq!(suites, ["trixie", "trixie-updates", "trixie-security"]);
        assert!(choose_sources(&parse_deb822(DEB822), "trixie", None).is_empty());
    }

    #[test]
    fn only_settings_about_fetching_are_taken_over() {
        let dump = "APT::Install-Recommends \"1\";\nAcquire::http::Proxy \"http://proxy.test:3128\";\n\
            Acquire::https::CaInfo \"/etc/host.pem\";\nAcquire::cdrom::mount \"/media\";\nAcquire::http::Proxy::x \"\";\n";
        assert_eq!(kept_settings(dump), ["Acquire::http::Proxy \"http://proxy.test:3128\";"]);
        assert_eq!(
            npm_lines("cafile=/x\nregistry=http://r.test\nprefix = /y\n"),
            "registry=http://r.test\n"
        );
    }

    #[test]
    fn pip_settings_come_from_files_and_variables_win() {
        let file = "[global]\ncert = /x\nindex-url = http://one.test\nextra-index-url =\n  http://a.test\n  http://b.test\n\
            [freeze]\ntimeout = 1\n";
        let all = [
            ("PIP_INDEX_URL", "http://two.test"),
            ("PIP_FIND_LINKS", "/wheels"),
            ("HOME", "/root"),
        ];
        let all = all.map(|(name, value)| (name.to_owned(), value.to_owned()));
        let found = pip_variables(&[file.to_owned()], all.into_iter());
        let expected = [
            ("PIP_EXTRA_INDEX_URL", "http://a.test http://b.test"),
            ("PIP_INDEX_URL", "http://two.test"),
        ];
        assert_eq!(found, expected.map(|(name, value)| (name.to_owned(), value.to_owned())).into());
    }
}
