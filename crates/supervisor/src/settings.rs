//! Certificates and package sources of the host: writes them to a folder of their own, before the
//! first command, and names them in variables. Without any, the sandbox is as its image made it.

use std::{
    fs::{self, File},
    io::{self, Read, Write},
    os::{fd::OwnedFd, unix::fs::symlink},
    path::Path,
};

use harvest_proto::launch::{Launch, NetworkSettings, SETTINGS_FOLDER};
use rustix::fs::{Mode, OFlags, openat};

use crate::{app::write_file, log, resolve::open_regular};

const BUNDLE: &str = "ca.pem";
const APT: &str = "apt.conf";
const CARGO: &str = "cargo.toml";

/// Where cargo looks in every folder above the current one.
const CARGO_CONFIG: &str = ".cargo/config.toml";

/// Where images keep the roots they trust: Debian and Alpine, Fedora, SUSE, OpenSSL's default.
const IMAGE_ROOTS: [&str; 4] = [
    "etc/ssl/certs/ca-certificates.crt",
    "etc/pki/tls/certs/ca-bundle.crt",
    "etc/ssl/ca-bundle.pem",
    "etc/ssl/cert.pem",
];
// Fifty times the size of usual ones.
const MAX_ROOTS_BYTES: u64 = 16 << 20;

/// A variable from which Node.js reads certificates besides its own.
const ADDING: &str = "NODE_EXTRA_CA_CERTS";
/// Variables that name a file with all certificates.
const REPLACING: [&str; 6] = [
    "SSL_CERT_FILE",
    "REQUESTS_CA_BUNDLE",
    "PIP_CERT",
    "CURL_CA_BUNDLE",
    "GIT_SSL_CAINFO",
    "CARGO_HTTP_CAINFO",
];

/// Writes the settings of a launch to the folder and names them in its variables. A sandbox works
/// without them, so a failure is only logged.
pub(crate) fn apply(launch: &mut Launch, folder: Option<OwnedFd>) {
    let Some(folder) = folder else { return };
    let settings = std::mem::take(&mut launch.settings);
    let variables = write(Path::new("/"), &folder, &settings).unwrap_or_else(|error| {
        log::line(format_args!("cannot write {SETTINGS_FOLDER}: {error}"));
        Vec::new()
    });
    let variables = variables.into_iter().map(|(name, file)| (name.to_owned(), path(file)));
    for (name, value) in variables.chain(settings.env) {
        launch.env.entry(name).or_insert(value);
    }
}

fn path(file: &str) -> String {
    format!("{SETTINGS_FOLDER}/{file}")
}

/// Writes the files; returns variables and the files they name.
fn write(
    root: &Path,
    folder: &OwnedFd,
    settings: &NetworkSettings,
) -> io::Result<Vec<(&'static str, &'static str)>> {
    for (name, text) in &settings.files {
        write_file(folder, name, text)?;
    }
    if settings.files.contains_key(CARGO) {
        link_cargo_config(root)?;
    }
    if settings.certificates.is_empty() {
        return Ok(Vec::new());
    }
    let has_roots = write_bundle(root, folder, &settings.certificates)?;
    let mut variables = vec![(ADDING, BUNDLE)];
    // Without roots in the image, its programs bring their own, which must stay.
    if has_roots {
        variables.extend(REPLACING.map(|name| (name, BUNDLE)));
        write_file(folder, APT, &format!("Acquire::https::CaInfo \"{}\";\n", path(BUNDLE)))?;
        variables.push(("APT_CONFIG", APT));
    }
    Ok(variables)
}

/// Leads cargo to its configuration, unless the image has one there. No variable can set sources.
fn link_cargo_config(root: &Path) -> io::Result<()> {
    let link = root.join(CARGO_CONFIG);
    link.parent().map_or(Ok(()), fs::create_dir_all)?;
    match symlink(path(CARGO), link) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        linked => linked,
    }
}

/// Writes the image's roots and these certificates to one file. True if the image has roots.
fn write_bundle(root: &Path, folder: &OwnedFd, certificates: &str) -> io::Result<bool> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::CLOEXEC;
    let mut bundle = File::from(openat(folder, BUNDLE, flags, Mode::from_raw_mode(0o644))?);
    let roots = IMAGE_ROOTS.iter().find_map(|path| open_regular(&root.join(path)).ok());
    let copied = match roots {
        Some(roots) => io::copy(&mut roots.take(MAX_ROOTS_BYTES), &mut bundle)?,
        None => 0,
    };
    bundle.write_all(format!("\n{certificates}").as_bytes())?;
    Ok(copied > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PRIVATE: &str = "-----BEGIN CERTIFICATE-----\nAA\n-----END CERTIFICATE-----\n";

    fn written(root: &Path, settings: &NetworkSettings) -> Vec<&'static str> {
        fs::create_dir_all(root.join("settings")).unwrap();
        let folder = File::open(root.join("settings")).unwrap().into();
        write(root, &folder, settings).unwrap().into_iter().map(|(name, _)| name).collect()
    }

    #[test]
    fn bundle_has_roots_of_image_and_host() {
        let root = tempfile::tempdir().unwrap();
        let settings =
            NetworkSettings { certificates: PRIVATE.to_owned(), ..NetworkSettings::default() };
        assert_eq!(written(root.path(), &settings), [ADDING], "programs keep their own roots");
        let roots = root.path().join(IMAGE_ROOTS[0]);
        fs::create_dir_all(roots.parent().unwrap()).unwrap();
        fs::write(roots, "public").unwrap();
        let names = written(root.path(), &settings);
        assert!(REPLACING.iter().all(|name| names.contains(name)), "{names:?}");
        let bundle = fs::read_to_string(root.path().join("settings/ca.pem")).unwrap();
        assert_eq!(bundle, format!("public\n{PRIVATE}"));
    }

    #[test]
    fn cargo_finds_the_hosts_sources() {
        let root = tempfile::tempdir().unwrap();
        let files = [(CARGO.to_owned(), "[source]".to_owned())].into();
        let settings = NetworkSettings { files, ..NetworkSettings::default() };
        for _ in 0..2 {
            assert_eq!(written(root.path(), &settings), [""; 0]);
        }
        let link = fs::read_link(root.path().join(CARGO_CONFIG)).unwrap();
        assert_eq!(link, Path::new("/run/harvest/cargo.toml"));
        let text = fs::read_to_string(root.path().join("settings/cargo.toml")).unwrap();
        assert_eq!(text, "[source]");
    }
}
