//! The host's mirrors of Debian for sandboxes: a file over the image's own list of sources, with
//! the image's release and without credentials. Has no mirror if the host uses Debian's servers.

use std::{
    fs::{self, Permissions},
    io::{self, Read},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use harvest_engine::{Bind, random_name};
use harvest_proto::redact::strip_url_logins;

use crate::{
    build::{
        bootstrap::SOURCES,
        copy::open_file,
        host_config::{HostSources, render_sources},
    },
    host_settings::host_of,
};

/// Debian's own servers, which images name already.
const OFFICIAL: [&str; 4] =
    ["deb.debian.org", "security.debian.org", "ftp.debian.org", "archive.debian.org"];

const OS_RELEASE: &str = "usr/lib/os-release";
// Forty times the size of usual ones.
const MAX_RELEASE_BYTES: u64 = 16 * 1024;

/// The sources of this host's apt.
#[derive(Debug)]
pub struct DebianMirrors {
    sources: HostSources,
}

impl DebianMirrors {
    /// Reads the sources of this host. Runs `apt-config`.
    #[must_use]
    pub fn of_host() -> Self {
        Self { sources: HostSources::read() }
    }

    /// The addresses of the mirrors, for any release.
    #[must_use]
    pub fn addresses(&self) -> Vec<String> {
        let uris = self.sources.debian().flat_map(|source| &source.uris);
        uris.filter_map(|uri| mirror(uri)).collect()
    }

    /// Whether the host has none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.addresses().is_empty()
    }

    /// The list of sources for a sandbox with these layers (top first), to mount over the image's
    /// own; `None` for an image that is not Debian or has no list. The list is a file in the
    /// folder, one for each release.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn bind(&self, layers: &[PathBuf], folder: &Path) -> io::Result<Option<Bind>> {
        let has_list = open_file(layers, Path::new(SOURCES)).is_some();
        let Some(suite) = suite_of(layers).filter(|_| has_list) else { return Ok(None) };
        let Some(text) = self.list(&suite) else { return Ok(None) };
        let source = folder.join(format!("debian-{suite}.sources"));
        if fs::read_to_string(&source).ok().as_ref() != Some(&text) {
            // Running sandboxes keep the file that they have.
            fs::create_dir_all(folder)?;
            let new = folder.join(random_name());
            fs::write(&new, &text)?;
            fs::set_permissions(&new, Permissions::from_mode(0o644))?;
            fs::rename(&new, &source)?;
        }
        Ok(Some(Bind { source, inside: Path::new("/").join(SOURCES) }))
    }

    /// The sources of a release; `None` without a mirror of it, or if one of them cannot be reached
    /// by name.
    fn list(&self, suite: &str) -> Option<String> {
        let mut sources = self.sources.of_suite(suite);
        if !sources.iter().flat_map(|source| &source.uris).any(|uri| mirror(uri).is_some()) {
            return None;
        }
        for source in &mut sources {
            let reachable = |uri: &String| host_of(uri).map(|_| strip_url_logins(uri));
            source.uris = source.uris.iter().map(reachable).collect::<Option<_>>()?;
        }
        Some(render_sources(&sources, false))
    }
}

/// An address without its login, if it is that of a mirror.
fn mirror(uri: &str) -> Option<String> {
    let host = host_of(uri)?;
    (!OFFICIAL.contains(&host)).then(|| strip_url_logins(uri))
}

/// The Debian release of an image.
fn suite_of(layers: &[PathBuf]) -> Option<String> {
    let mut text = String::new();
    let file = open_file(layers, Path::new(OS_RELEASE))?;
    file.take(MAX_RELEASE_BYTES).read_to_string(&mut text).ok()?;
    let field = |key: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
        line.map(|value| value.trim().trim_matches('"'))
    };
    let suite = field("VERSION_CODENAME").filter(|_| field("ID") == Some("debian"))?;
    // It becomes a part of a path and of a file that apt reads.
    let valid = |byte: u8| byte.is_ascii_lowercase();
    (!suite.is_empty() && suite.len() <= 32 && suite.bytes().all(valid)).then(|| suite.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIST: &str = "deb https://user:hidden@mirror.corp.example/debian bookworm main\n\
        deb http://deb.debian.org/debian-security bookworm-security main\n";

    fn image(folder: &Path, name: &str, release: Option<&str>) -> PathBuf {
        let root = folder.join(name);
        for (path, text) in [(SOURCES, Some("Types: deb\n")), (OS_RELEASE, release)] {
            let Some(text) = text else { continue };
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    #[test]
    fn image_keeps_its_release_at_the_hosts_mirror() {
        let folder = tempfile::tempdir().unwrap();
        let mirrors = DebianMirrors { sources: HostSources::parse(LIST, Some("bookworm")) };
        assert_eq!(mirrors.addresses(), ["https://mirror.corp.example/debian"]);
        let release = "NAME=\"Debian\"\nVERSION_CODENAME=trixie\nID=debian\n";
        let image = image(folder.path(), "image", Some(release));
        let lists = folder.path().join("lists");
        for _ in 0..2 {
            let bind = mirrors.bind(std::slice::from_ref(&image), &lists).unwrap().unwrap();
            assert_eq!(bind.inside, Path::new("/").join(SOURCES));
            let list = fs::read_to_string(bind.source).unwrap();
            assert_eq!(
                list,
                "Types: deb\nURIs: https://mirror.corp.example/debian\nSuites: trixie\n\
                 Components: main\n\nTypes: deb\nURIs: http://deb.debian.org/debian-security\n\
                 Suites: trixie-security\nComponents: main\n"
            );
        }
        assert_eq!(fs::read_dir(lists).unwrap().count(), 1);
    }

    #[test]
    fn only_debian_images_with_mirrors_get_sources() {
        let folder = tempfile::tempdir().unwrap();
        let bound = |list: &str, layers: &[PathBuf]| {
            let mirrors = DebianMirrors { sources: HostSources::parse(list, Some("bookworm")) };
            !mirrors.is_empty()
                && mirrors.bind(layers, &folder.path().join("lists")).unwrap().is_some()
        };
        let debian = image(folder.path(), "a", Some("ID=debian\nVERSION_CODENAME=bookworm\n"));
        assert!(bound(LIST, std::slice::from_ref(&debian)));
        let official = "deb http://deb.debian.org/debian bookworm main\n\
            deb https://vendor.example/apt bookworm main\n";
        assert!(!bound(official, std::slice::from_ref(&debian)), "nothing to change");
        let address = "deb http://10.0.0.1/debian bookworm main\n";
        assert!(!bound(address, std::slice::from_ref(&debian)), "it cannot be reached by name");
        for release in [
            None,
            Some("ID=ubuntu\nVERSION_CODENAME=noble\n"),
            Some("ID=debian\nVERSION_CODENAME=../x\n"),
        ] {
            let other = image(folder.path(), "b", release);
            assert!(!bound(LIST, &[other]), "{release:?}");
        }
        fs::remove_file(debian.join(SOURCES)).unwrap();
        assert!(!bound(LIST, &[debian]), "it has no list of its own");
    }
}
