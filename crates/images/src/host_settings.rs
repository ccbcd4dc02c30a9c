//! The network settings of this host for sandboxes: its own certificates and its mirrors of npm,
//! pip and cargo, without credentials. Reads files and variables; runs nothing. A host with only
//! public registries and certificates has none.

use std::{
    collections::{BTreeMap, HashSet},
    env, fs,
    path::{Path, PathBuf},
};

use harvest_proto::{
    launch::{MAX_SETTINGS_BYTES, NetworkSettings, SETTINGS_FOLDER},
    redact::strip_url_logins,
};

use crate::build::host_config::{npm_texts, pip_files, pip_variables, uv_variables};

/// Variables that name a file with certificates.
const CERTIFICATE_VARIABLES: [&str; 7] = [
    "SSL_CERT_FILE",
    "NODE_EXTRA_CA_CERTS",
    "REQUESTS_CA_BUNDLE",
    "PIP_CERT",
    "CURL_CA_BUNDLE",
    "GIT_SSL_CAINFO",
    "CARGO_HTTP_CAINFO",
];

/// The bundles of distributions, which hold public roots and what the host's admin added.
const SYSTEM_BUNDLES: [&str; 3] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
];

/// Debian's and Alpine's public roots.
const PUBLIC_ROOTS: &str = "/usr/share/ca-certificates";

/// Where the admin adds certificates: Debian and Alpine, Fedora, SUSE.
const ANCHORS: [&str; 3] = [
    "/usr/local/share/ca-certificates",
    "/etc/pki/ca-trust/source/anchors",
    "/etc/pki/trust/anchors",
];

const BEGIN: &str = "-----BEGIN CERTIFICATE-----";
const END: &str = "-----END CERTIFICATE-----";

// For certificates that the server itself adds.
const RESERVED_BYTES: usize = 8 * 1024;

const DEFAULT_NPM_REGISTRY: &str = "registry.npmjs.org";

/// The settings of this host, and how many of its certificates do not fit.
#[must_use]
pub fn host_settings() -> (NetworkSettings, usize) {
    let mut settings = NetworkSettings::default();
    let npm = npm_registries(&npm_texts(), env::vars());
    if !npm.is_empty() {
        settings.files.insert("npmrc".to_owned(), npm);
        let path = format!("{SETTINGS_FOLDER}/npmrc");
        // Of all files it has the lowest precedence: a project's own registry stays.
        settings.env.insert("npm_config_globalconfig".to_owned(), path);
    }
    settings.env.extend(pip_indexes(pip_variables(&pip_files(), env::vars())));
    let uv = uv_variables(&settings.env);
    settings.env.extend(uv);
    let cargo = cargo_sources(&cargo_config());
    if !cargo.is_empty() {
        settings.files.insert("cargo.toml".to_owned(), cargo);
    }
    let space = MAX_SETTINGS_BYTES.saturating_sub(settings.bytes() + RESERVED_BYTES);
    let left_out;
    (settings.certificates, left_out) = host_certificates(space);
    (settings, left_out)
}

/// The certificates that this host trusts besides the public ones, as far as they fit, and how many
/// do not.
fn host_certificates(space: usize) -> (String, usize) {
    let read = |path: &Path| fs::read_to_string(path).unwrap_or_default();
    let public = read_folder(Path::new(PUBLIC_ROOTS), 2);
    let system: String = SYSTEM_BUNDLES.iter().map(|path| read(Path::new(path))).collect();
    let anchors: String = ANCHORS.iter().map(|path| read_folder(Path::new(path), 2)).collect();
    let named: String = CERTIFICATE_VARIABLES
        .iter()
        .filter_map(env::var_os)
        .map(|path| read(Path::new(&path)) + "\n")
        .collect();
    // Without the public roots it is unknown which ones of the bundle the admin added.
    let known = if public.is_empty() { &system } else { &public };
    let added = private_certificates(&[&anchors, &system, &named].map(String::as_str), known);
    let (mut text, mut left_out) = (String::new(), 0);
    for certificate in added {
        match text.len() + certificate.len() < space {
            true => text += &(certificate + "\n"),
            false => left_out += 1,
        }
    }
    (text, left_out)
}

/// The certificates of some texts that are not among the known ones, each once.
fn private_certificates(texts: &[&str], known: &str) -> Vec<String> {
    let body = |pem: &str| pem.split_whitespace().collect::<String>();
    let mut seen: HashSet<String> = certificates(known).map(body).collect();
    let all = texts.iter().flat_map(|text| certificates(text));
    all.filter(|pem| seen.insert(body(pem))).map(str::to_owned).collect()
}

/// The certificates in a PEM text.
fn certificates(text: &str) -> impl Iterator<Item = &str> {
    text.match_indices(BEGIN).filter_map(move |(start, _)| {
        let end = text[start..].find(END)? + END.len();
        Some(&text[start..start + end])
    })
}

/// The texts of all files of a folder, one after another.
fn read_folder(folder: &Path, depth: usize) -> String {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    paths.sort();
    let read = |path: &PathBuf| match path.is_dir() {
        true if depth > 0 => read_folder(path, depth - 1),
        true => String::new(),
        false => fs::read_to_string(path).unwrap_or_default() + "\n",
    };
    paths.iter().map(read).collect()
}

/// The lines of an npm configuration that name registries other than the public one.
fn npm_registries(texts: &[String], variables: impl Iterator<Item = (String, String)>) -> String {
    let mut registries = BTreeMap::new();
    let lines = texts.iter().flat_map(|text| text.lines()).filter_map(|line| line.split_once('='));
    let mut add = |key: &str, value: &str| {
        let (key, value) = (key.trim(), value.trim().trim_matches(['"', '\'']));
        if key == "registry" || key.starts_with('@') && key.ends_with(":registry") {
            registries.insert(key.to_owned(), value.to_owned());
        }
    };
    lines.for_each(|(key, value)| add(key, value));
    for (name, value) in variables {
        if name.eq_ignore_ascii_case("npm_config_registry") {
            add("registry", &value);
        }
    }
    let is_mirror = |url: &str| host_of(url).is_some_and(|host| host != DEFAULT_NPM_REGISTRY);
    let mirrors = registries.iter().filter(|(_, url)| is_mirror(url));
    mirrors.map(|(key, url)| format!("{key}={}\n", strip_url_logins(url))).collect()
}

/// pip's variables with indexes.
fn pip_indexes(variables: BTreeMap<String, String>) -> BTreeMap<String, String> {
    let kept = |(name, value): (String, String)| {
        let value = match &*name {
            "PIP_INDEX_URL" | "PIP_EXTRA_INDEX_URL" => {
                let urls = value.split_whitespace().filter(|url| host_of(url).is_some());
                urls.map(strip_url_logins).collect::<Vec<_>>().join(" ")
            }
            "PIP_TRUSTED_HOST" => value,
            _ => return None,
        };
        (!value.is_empty()).then_some((name, value))
    };
    variables.into_iter().filter_map(kept).collect()
}

fn cargo_config() -> String {
    let home = env::var_os("HOME").map(PathBuf::from).unwrap_or_default();
    let folder = env::var_os("CARGO_HOME").map_or_else(|| home.join(".cargo"), PathBuf::from);
    let read = |name: &str| fs::read_to_string(folder.join(name)).ok();
    read("config.toml").or_else(|| read("config")).unwrap_or_default()
}

/// The sources and registries of a cargo configuration that are elsewhere than on this host.
fn cargo_sources(config: &str) -> String {
    let Ok(config) = config.parse::<toml::Table>() else { return String::new() };
    let mut kept = Vec::new();
    for (section, keys) in [("source", ["registry", "replace-with"]), ("registries", ["index", ""])]
    {
        let entries = config.get(section).and_then(toml::Value::as_table);
        for (name, entry) in entries.into_iter().flatten() {
            let texts = keys.iter().filter_map(|key| Some((*key, entry.get(key)?.as_str()?)));
            let usable =
                |(key, text): &(&str, &str)| *key == "replace-with" || host_of(text).is_some();
            let texts: Vec<_> = texts.filter(usable).collect();
            if !texts.is_empty() {
                kept.push((section, name, texts));
            }
        }
    }
    // A source that is replaced by one that is left out would make every command fail.
    let mut texts = kept.iter().flat_map(|(.., texts)| texts);
    let exists = |wanted: &str| kept.iter().any(|(_, name, _)| *name == wanted);
    if texts.any(|(key, text)| *key == "replace-with" && !exists(text)) {
        return String::new();
    }
    // A JSON string is a TOML string, too.
    let quoted = |text: &str| serde_json::Value::from(text).to_string();
    let line =
        |(key, text): &(&str, &str)| format!("{key} = {}\n", quoted(&strip_url_logins(text)));
    let table = |(section, name, texts): &(&str, &String, Vec<(&str, &str)>)| {
        format!("[{section}.{}]\n{}", quoted(name), texts.iter().map(line).collect::<String>())
    };
    kept.iter().map(table).collect()
}

/// The host of a URL, if a sandbox can reach it by name: not an address, and not this host.
pub(crate) fn host_of(url: &str) -> Option<&str> {
    let (_, rest) = url.split_once("://")?;
    let authority = rest.split(['/', '?', '#']).next()?;
    let host = authority.rsplit('@').next()?;
    let host = host.split(':').next()?;
    let top = host.rsplit('.').next()?;
    let by_name = top.starts_with(|first: char| first.is_ascii_alphabetic());
    (by_name && host != "localhost" && !host.contains(['[', '$'])).then_some(host)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pem(body: &str) -> String {
        format!("{BEGIN}\n{body}\n{END}\n")
    }

    #[test]
    fn only_added_certificates_are_private() {
        let public = format!("# Root\n{}{}", pem("AA\nBB"), pem("CC"));
        let system = format!("{}{}{}", pem("AABB"), pem("CC"), pem("DD"));
        let named = format!("{}{}{}", pem("D\nD"), pem("EE"), "-----BEGIN CERTIFICATE-----\ncut");
        assert_eq!(
            private_certificates(&[&system, &named], &public),
            [pem("DD").trim(), pem("EE").trim()]
        );
        assert_eq!(private_certificates(&[&system], &system), [""; 0]);
    }

    #[test]
    fn npm_registries_have_no_credentials() {
        let text = "registry = https://user:pw@npm.corp.example/repo/\n\
            //npm.corp.example/:_authToken=secret\n@corp:registry=\"https://scoped.example\"\n\
            @here:registry=http://localhost:4873\n@old:registry=http://10.0.0.1/\ncache=/x\n";
        assert_eq!(
            npm_registries(&[text.to_owned()], std::iter::empty()),
            "@corp:registry=https://scoped.example\nregistry=https://npm.corp.example/repo/\n"
        );
        let public = ("NPM_CONFIG_REGISTRY", "https://registry.npmjs.org/");
        let public = [(public.0.to_owned(), public.1.to_owned())].into_iter();
        assert_eq!(npm_registries(&[], public), "");
    }

    #[test]
    fn pip_indexes_have_no_credentials() {
        let variables = [
            ("PIP_INDEX_URL", "https://u:p@pip.corp.example/simple"),
            ("PIP_EXTRA_INDEX_URL", "http://127.0.0.1/x https://more.example/simple"),
            ("PIP_PROXY", "http://proxy.example"),
        ];
        let variables = variables.map(|(name, value)| (name.to_owned(), value.to_owned()));
        let kept = pip_indexes(variables.into());
        let kept: Vec<_> = kept.iter().map(|(name, value)| (&**name, &**value)).collect();
        assert_eq!(
            kept,
            [
                ("PIP_EXTRA_INDEX_URL", "https://more.example/simple"),
                ("PIP_INDEX_URL", "https://pip.corp.example/simple")
            ]
        );
    }

    #[test]
    fn cargo_mirrors_are_kept_without_tokens() {
        let config = "[source.crates-io]\nreplace-with = \"corp\"\n\
            [source.corp]\nregistry = \"sparse+https://u:p@crates.corp.example/\"\n\
            [registries.own]\nindex = \"sparse+https://own.example/\"\ntoken = \"secret\"\n\
            [build]\njobs = 1\n";
        let kept = cargo_sources(config);
        for line in [
            "replace-with = \"corp\"",
            "registry = \"sparse+https://crates.corp.example/\"",
            "index = \"sparse+https://own.example/\"",
        ] {
            assert!(kept.contains(line), "{kept}");
        }
        assert!(!kept.contains("secret") && !kept.contains("jobs"), "{kept}");
        let vendored = "[source.crates-io]\nreplace-with = \"vendored\"\n\
            [source.vendored]\ndirectory = \"/vendor\"\n";
        assert_eq!(cargo_sources(vendored), "");
        assert_eq!(cargo_sources("[net]\nretry = 5\n"), "");
    }
}
