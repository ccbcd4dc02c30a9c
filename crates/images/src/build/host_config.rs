//! The host's settings for fetching packages: proxies, certificates, mirrors, registries. Build
//! steps get them in a read-only folder and in environment variables; an image keeps none of them.
//! Has no default mirror or registry.

use std::{
    collections::BTreeMap,
    env, fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
};

use harvest_engine::Bind;
use harvest_proto::redact::Redactor;

use super::secrets;
use crate::ImageError;

/// The folder's path in the sandboxes of steps.
const INSIDE: &str = "/run/harvest";

// Variables from which programs read the path of the certificate bundle.
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

// pip's settings about fetching; its other settings concern the host's disk.
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

// npm's settings about the host's disk.
const NPM_EXCLUDED: [&str; 10] = [
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

// Prefixes of apt's settings about fetching.
const APT_PREFIXES: [&str; 9] = [
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

/// The host's settings, written to a folder for one build step. Dropping it removes the folder.
#[derive(Debug)]
pub(crate) struct HostConfig {
    path: PathBuf,
    /// Environment variables of the step.
    pub(crate) env: BTreeMap<String, String>,
    /// Masks the host's secrets in the step's output.
    pub(crate) redactor: Redactor,
    has_sources: bool,
    proxies: bool,
}

impl HostConfig {
    /// Fills the empty folder `path`. `suite` is the image's Debian suite, if it has one. Behind a
    /// door the gateway uses the host's proxies; the step gets none.
    pub(crate) fn write(
        path: PathBuf,
        suite: Option<&str>,
        proxies: bool,
    ) -> Result<Self, ImageError> {
        // The ids of the sandbox must be able to read it; parent folders keep other users out.
        let readable = fs::Permissions::from_mode(0o755);
        fs::set_permissions(&path, readable).map_err(|e| ImageError::file("create", &path, e))?;
        let mut folder = Self {
            path,
            env: BTreeMap::new(),
            redactor: Redactor::new(),
            has_sources: false,
            proxies,
        };
        folder.certificates()?;
        folder.apt(suite)?;
        folder.npm()?;
        folder.env.extend(pip_variables(&pip_files(), env::vars()));
        folder.env.extend(uv_variables(&folder.env));
        folder.env.extend(proxy_variables(env::vars()));
        folder.env.retain(|name, _| proxies || !is_proxy_key(name));
        for (name, value) in &folder.env {
            secrets::add_npm_secrets(&mut folder.redactor, &format!("{name}={value}"));
        }
        Ok(folder)
    }

    /// The bind mounts of a step's sandbox. `image_has_sources`: the image has a file
    /// [`SOURCES`](super::bootstrap::SOURCES), over which the host's sources are mounted.
    pub(crate) fn binds(&self, image_has_sources: bool) -> Vec<Bind> {
        let mut binds = vec![Bind { source: self.path.clone(), inside: INSIDE.into() }];
        if self.has_sources && image_has_sources {
            let inside = Path::new("/").join(super::bootstrap::SOURCES);
            binds.push(Bind { source: self.path.join("debian.sources"), inside });
        }
        binds
    }

    fn write_file(&self, name: &str, text: &[u8]) -> Result<(), ImageError> {
        let path = self.path.join(name);
        fs::write(&path, text)
            .and_then(|()| fs::set_permissions(&path, fs::Permissions::from_mode(0o644)))
            .map_err(|e| ImageError::file("write", path, e))
    }

    fn certificates(&mut self) -> Result<(), ImageError> {
        let default = || PathBuf::from("/etc/ssl/certs/ca-certificates.crt");
        let bundle = env::var_os("SSL_CERT_FILE").map_or_else(default, PathBuf::from);
        // Without a bundle of the host, the image's own certificates apply.
        let Ok(bytes) = fs::read(&bundle) else { return Ok(()) };
        self.write_file("ca.pem", &bytes)?;
        self.env.extend(CA_VARIABLES.map(|name| (name.to_owned(), format!("{INSIDE}/ca.pem"))));
        Ok(())
    }

    fn apt(&mut self, suite: Option<&str>) -> Result<(), ImageError> {
        let mut settings = apt_settings();
        settings.retain(|line| self.proxies || !line.to_ascii_lowercase().contains("::proxy"));
        // Steps run as root; fetching as the user `_apt` would need folders that it can read.
        settings.push("APT::Sandbox::User \"root\";".to_owned());
        settings.push("Acquire::Languages \"none\";".to_owned());
        if self.env.contains_key("SSL_CERT_FILE") {
            settings.push(format!("Acquire::https::CaInfo \"{INSIDE}/ca.pem\";"));
        }
        settings.iter().for_each(|setting| secrets::add_url_passwords(&mut self.redactor, setting));
        self.write_file("apt.conf", (settings.join("\n") + "\n").as_bytes())?;
        self.env.insert("APT_CONFIG".to_owned(), format!("{INSIDE}/apt.conf"));
        if let Some(sources) = suite.map(debian_sources).filter(|sources| !sources.is_empty()) {
            self.write_file("debian.sources", render_sources(&sources, false).as_bytes())?;
            self.has_sources = true;
        }
        Ok(())
    }

    fn npm(&mut self) -> Result<(), ImageError> {
        let lines: String = npm_texts().iter().map(|text| npm_lines(text, self.proxies)).collect();
        secrets::add_npm_secrets(&mut self.redactor, &lines);
        self.write_file("npmrc", lines.as_bytes())?;
        self.env.insert("npm_config_userconfig".to_owned(), format!("{INSIDE}/npmrc"));
        for (name, value) in env::vars() {
            let key = name.to_ascii_lowercase();
            let Some(setting) = key.strip_prefix("npm_config_") else { continue };
            if !NPM_EXCLUDED.contains(&setting.replace('_', "-").as_str()) {
                self.env.insert(key, value);
            }
        }
        Ok(())
    }
}

impl Drop for HostConfig {
    fn drop(&mut self) {
        // The next collection deletes any leftover.
        let _ = fs::remove_dir_all(&self.path);
    }
}

// uv does not read pip's settings; the index URLs are the same.
pub(crate) fn uv_variables(known: &BTreeMap<String, String>) -> BTreeMap<String, String> {
    let same = [("PIP_INDEX_URL", "UV_DEFAULT_INDEX"), ("PIP_EXTRA_INDEX_URL", "UV_INDEX")];
    let pair = |(pip, uv): (&str, &str)| Some((uv.to_owned(), known.get(pip)?.clone()));
    same.into_iter().filter_map(pair).collect()
}

/// The host's npm configuration files; later ones override earlier ones.
pub(crate) fn npm_texts() -> Vec<String> {
    let home = env::var_os("HOME").map(PathBuf::from).unwrap_or_default();
    let user =
        env::var_os("NPM_CONFIG_USERCONFIG").map_or_else(|| home.join(".npmrc"), PathBuf::from);
    let files = [Path::new("/etc/npmrc"), Path::new("/usr/etc/npmrc"), &user];
    files.iter().filter_map(|file| fs::read_to_string(file).ok()).collect()
}

/// Whether a variable or a key of npm's names proxies.
fn is_proxy_key(key: &str) -> bool {
    key.to_ascii_lowercase().ends_with("proxy")
}

fn npm_lines(text: &str, proxies: bool) -> String {
    let kept = |line: &&str| {
        let key = line.split('=').next().unwrap_or_default().trim();
        !NPM_EXCLUDED.contains(&key) && (proxies || !is_proxy_key(key))
    };
    text.lines().filter(kept).map(|line| format!("{line}\n")).collect()
}

fn proxy_variables(all: impl Iterator<Item = (String, String)>) -> BTreeMap<String, String> {
    all.filter(|(name, _)| PROXY_VARIABLES.contains(&name.to_ascii_lowercase().as_str())).collect()
}

pub(crate) fn pip_files() -> Vec<String> {
    let home = env::var_os("HOME").map(PathBuf::from).unwrap_or_default();
    let mut paths = vec![
        PathBuf::from("/etc/pip.conf"),
        home.join(".pip/pip.conf"),
        home.join(".config/pip/pip.conf"),
    ];
    paths.extend(env::var_os("PIP_CONFIG_FILE").map(PathBuf::from));
    paths.iter().filter_map(|path| fs::read_to_string(path).ok()).collect()
}

// Later files override earlier ones, and variables override files, as in pip itself.
pub(crate) fn pip_variables(
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

/// The host's apt settings about fetching, as lines of an apt configuration.
pub(crate) fn apt_settings() -> Vec<String> {
    let dump = Command::new("apt-config").arg("dump").output();
    // A host without apt has no settings.
    dump.map_or_else(|_| Vec::new(), |dump| fetch_settings(&String::from_utf8_lossy(&dump.stdout)))
}

fn fetch_settings(dump: &str) -> Vec<String> {
    // Files and programs of the host do not exist in the sandbox.
    let foreign = ["CaInfo", "CaPath", "SslCert", "SslKey", "AutoDetect", "Auto-Detect"];
    let kept = |line: &&str| {
        APT_PREFIXES.iter().any(|prefix| line.starts_with(prefix))
            && !foreign
                .iter()
                .any(|word| line.to_ascii_lowercase().contains(&word.to_ascii_lowercase()))
            && !line.ends_with("\"\";")
    };
    dump.lines().filter(kept).map(str::to_owned).collect()
}

/// A source of Debian packages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AptSource {
    pub(crate) uris: Vec<String>,
    suites: Vec<String>,
    components: Vec<String>,
    signed_by: Option<String>,
}

/// The sources of the host's apt, for all of its suites.
#[derive(Debug)]
pub(crate) struct HostSources {
    all: Vec<AptSource>,
    /// The host's own suite, if it is Debian.
    suite: Option<String>,
}

impl HostSources {
    /// Reads the files that apt reads.
    pub(crate) fn read() -> Self {
        let (list, parts) = apt_paths();
        let mut all = parse_list(&fs::read_to_string(list).unwrap_or_default());
        for name in file_names(&parts) {
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
        let suite = field("VERSION_CODENAME").filter(|_| field("ID") == Some("debian"));
        Self { all, suite: suite.map(str::to_owned) }
    }

    #[cfg(test)]
    pub(crate) fn parse(list: &str, suite: Option<&str>) -> Self {
        Self { all: parse_list(list), suite: suite.map(str::to_owned) }
    }

    /// The sources of Debian, without those of other vendors.
    pub(crate) fn debian(&self) -> impl Iterator<Item = &AptSource> {
        self.all.iter().filter(|source| is_debian(source))
    }

    /// The sources for a Debian suite; empty when there are none.
    pub(crate) fn of_suite(&self, suite: &str) -> Vec<AptSource> {
        choose_sources(&self.all, suite, self.suite.as_deref())
    }
}

/// The host's sources for a Debian suite; empty when it has none.
pub(crate) fn debian_sources(suite: &str) -> Vec<AptSource> {
    HostSources::read().of_suite(suite)
}

/// The file and the folder from which apt reads sources.
fn apt_paths() -> (PathBuf, PathBuf) {
    let keys = ["LIST", "Dir::Etc::sourcelist/f", "PARTS", "Dir::Etc::sourceparts/d"];
    let shell = Command::new("apt-config").arg("shell").args(keys).output();
    let shell = shell.map(|shell| String::from_utf8_lossy(&shell.stdout).into_owned());
    let shell = shell.unwrap_or_default();
    let path = |key: &str, default: &str| {
        let value = shell.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
        PathBuf::from(value.map_or(default, |value| value.trim_matches('\'')))
    };
    (path("LIST", "/etc/apt/sources.list"), path("PARTS", "/etc/apt/sources.list.d"))
}

/// The names in a folder, sorted; none when it cannot be read.
fn file_names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> =
        entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    names
}

fn choose_sources(all: &[AptSource], suite: &str, host_suite: Option<&str>) -> Vec<AptSource> {
    let chosen = sources_of_suite(all, suite);
    match host_suite {
        // A mirror of one Debian suite has the other suites too.
        Some(host_suite) if chosen.is_empty() => sources_of_suite(all, host_suite)
            .into_iter()
            .map(|mut source| {
                for name in &mut source.suites {
                    *name = name.replacen(host_suite, suite, 1);
                }
                source
            })
            .collect(),
        _ => chosen,
    }
}

fn sources_of_suite(all: &[AptSource], suite: &str) -> Vec<AptSource> {
    let wanted = [suite.to_owned(), format!("{suite}-updates"), format!("{suite}-security")];
    let mut chosen = Vec::new();
    for source in all.iter().filter(|source| is_debian(source)) {
        let suites: Vec<_> =
            source.suites.iter().filter(|name| wanted.contains(name)).cloned().collect();
        if !suites.is_empty() {
            chosen.push(AptSource { suites, ..source.clone() });
        }
    }
    chosen
}

// Other vendors name their suites like Debian's; they have other signing keys and URLs.
fn is_debian(source: &AptSource) -> bool {
    let is_debian_uri = |uri: &String| {
        let last = uri.trim_end_matches('/').rsplit('/').next().unwrap_or_default();
        matches!(last, "debian" | "debian-security")
    };
    source.components.iter().any(|component| component == "main")
        && match &source.signed_by {
            Some(key) => Path::new(key)
                .file_name()
                .is_some_and(|name| name.to_string_lossy().starts_with("debian-archive")),
            None => source.uris.iter().all(is_debian_uri),
        }
}

fn parse_list(text: &str) -> Vec<AptSource> {
    text.lines().filter_map(parse_list_line).collect()
}

fn parse_list_line(line: &str) -> Option<AptSource> {
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
    Some(AptSource { uris: vec![uri], suites: vec![suite], components: words.collect(), signed_by })
}

fn parse_deb822(text: &str) -> Vec<AptSource> {
    let text: String = text
        .lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| format!("{line}\n"))
        .collect();
    text.split("\n\n").filter_map(parse_stanza).collect()
}

fn parse_stanza(stanza: &str) -> Option<AptSource> {
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
    let signed_by = fields.get("signed-by").cloned();
    Some(AptSource {
        uris: words("uris"),
        suites: words("suites"),
        components: words("components"),
        signed_by,
    })
}

/// Sources in apt's format. `keys`: with the paths of the host's key files, which an image may
/// lack; without them apt uses Debian's own keys, which every Debian has.
pub(crate) fn render_sources(sources: &[AptSource], keys: bool) -> String {
    let render = |source: &AptSource| {
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
    fn only_debian_sources_of_the_suite_are_chosen() {
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
    fn one_line_sources_are_parsed() {
        let list = "# deb http://no.test/debian bookworm main\n\
            deb [arch=amd64 signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://a.test/debian bookworm main\n\
            deb-src http://a.test/debian bookworm main\n\
            deb https://vendor.test/linux/debian bookworm stable\n";
        let chosen = choose_sources(&parse_list(list), "bookworm", None);
        assert_eq!(chosen.len(), 1);
        assert_eq!(chosen[0].uris, ["http://a.test/debian"]);
    }

    #[test]
    fn mirror_of_another_suite_is_used() {
        let chosen = choose_sources(&parse_deb822(DEB822), "trixie", Some("bookworm"));
        let suites: Vec<_> = chosen.iter().flat_map(|source| source.suites.clone()).collect();
        assert_eq!(suites, ["trixie", "trixie-updates", "trixie-security"]);
        assert!(choose_sources(&parse_deb822(DEB822), "trixie", None).is_empty());
    }

    #[test]
    fn only_settings_about_fetching_are_copied() {
        let dump = "APT::Install-Recommends \"1\";\nAcquire::http::Proxy \"http://proxy.test:3128\";\n\
            Acquire::https::CaInfo \"/etc/host.pem\";\nAcquire::cdrom::mount \"/media\";\nAcquire::http::Proxy::x \"\";\n";
        assert_eq!(fetch_settings(dump), ["Acquire::http::Proxy \"http://proxy.test:3128\";"]);
        assert_eq!(
            npm_lines("cafile=/x\nregistry=http://r.test\nprefix = /y\n", true),
            "registry=http://r.test\n"
        );
        let proxied = "https-proxy=http://p.test\nregistry=http://r.test\n";
        assert_eq!(npm_lines(proxied, true), proxied);
        assert_eq!(npm_lines(proxied, false), "registry=http://r.test\n");
    }

    #[test]
    fn pip_variables_override_files() {
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
