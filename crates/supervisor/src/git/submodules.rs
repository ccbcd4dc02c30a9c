//! Submodules of a checkout: those that the session's own repositories or public hosts have are
//! fetched through the git door, all others stay empty with a warning. `.gitmodules` comes from the
//! repository, so nothing of it reaches git except a name, a path and a URL that were judged here;
//! git takes no URL from the file itself.

use std::{fmt::Write as _, future::Future, path::Path, pin::Pin};

use harvest_proto::{
    bridge::Checkout, door::public_git_url, repository_address::is_same_url,
    repository_address::of_ssh,
};

use super::{Git, requests::FETCH_TIMEOUT};
use crate::files;

const FILE: &str = ".gitmodules";

// Of one checkout, those of its submodules included.
const MAX_SUBMODULES: usize = 50;
const MAX_LEVELS: usize = 4;

/// What submodules may be fetched from.
#[derive(Clone, Copy)]
pub(crate) struct Sources<'a> {
    /// The session's repositories.
    pub(crate) checkouts: &'a [Checkout],
    /// Hosts of public repositories.
    pub(crate) hosts: &'a [String],
}

/// A section of `.gitmodules`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Declared {
    name: String,
    path: String,
    url: String,
}

/// Where a submodule comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Source {
    /// The repository's URL outside the sandbox; URLs of its own submodules are relative to it.
    url: String,
    /// Its URL at the door.
    remote: String,
}

impl Git<'_> {
    /// Brings the submodules of a checkout to the commits that it names. Returns a warning for each
    /// one that stays empty or as it was.
    pub(crate) async fn update_submodules(
        &self,
        checkout: &Checkout,
        sources: Sources<'_>,
    ) -> Vec<String> {
        let folder = self.folder(&checkout.folder);
        if !Path::new(&folder).join(FILE).exists() {
            return Vec::new();
        }
        let mut warnings = Vec::new();
        let mut left = MAX_SUBMODULES;
        let at = Level { folder: &folder, url: checkout.url.as_deref(), depth: 1 };
        self.update_level(at, sources, &mut left, &mut warnings).await;
        let name = &checkout.name;
        warnings.iter().map(|warning| format!("submodule {warning} (in {name})")).collect()
    }

    fn update_level<'a>(
        &'a self,
        at: Level<'a>,
        sources: Sources<'a>,
        left: &'a mut usize,
        warnings: &'a mut Vec<String>,
    ) -> Pin<Box<dyn Future<Output = ()> + 'a>> {
        Box::pin(async move {
            let text = files::read_small(&Path::new(at.folder).join(FILE), self.user);
            let declared = match text {
                Ok(Some(text)) => parse(&text),
                Ok(None) => return,
                Err(error) => return warnings.push(format!("file {FILE} is not read: {error}")),
            };
            for one in declared {
                let shown = printable(&one.name);
                if *left == 0 || at.depth > MAX_LEVELS {
                    return warnings.push(format!(
                        "`{shown}` and later ones are left empty: a checkout has at most \
                         {MAX_SUBMODULES} submodules on {MAX_LEVELS} levels"
                    ));
                }
                *left -= 1;
                let source = match judge(&one, at.url, sources) {
                    Ok(source) => source,
                    Err(why) => {
                        warnings.push(format!("`{shown}` is left empty: {why}"));
                        continue;
                    }
                };
                if let Err(tail) = self.update_one(at.folder, &one, &source).await {
                    warnings.push(format!(
                        "`{shown}` cannot be fetched; `git submodule update {}` tries again: {tail}",
                        one.path
                    ));
                    continue;
                }
                let folder = format!("{}/{}", at.folder, one.path);
                let next = Level { folder: &folder, url: Some(&source.url), depth: at.depth + 1 };
                self.update_level(next, sources, left, warnings).await;
            }
        })
    }

    async fn update_one(
        &self,
        folder: &str,
        declared: &Declared,
        source: &Source,
    ) -> Result<(), String> {
        let key = |name: &str| format!("submodule.{}.{name}", declared.name);
        self.run(folder, &["config", &key("url"), &source.remote]).await?;
        self.run(folder, &["config", &key("active"), "true"]).await?;
        self.run_update(folder, &source.remote, &["--", &declared.path]).await
    }

    /// Moves the submodules that were fetched at the boot to the commits of another commit of the
    /// checkout.
    pub(super) async fn move_submodules(&self, folder: &str) -> Result<(), String> {
        let urls = ["config", "--get-regexp", r"^submodule\..*\.url$"];
        let Ok(urls) = self.run(folder, &urls).await else { return Ok(()) };
        let remote = urls.split_whitespace().last().unwrap_or_default();
        self.run_update(folder, remote, &["--recursive"]).await
    }

    /// Only the protocol of the door is used, whatever a `.gitmodules` further down says.
    async fn run_update(&self, folder: &str, remote: &str, what: &[&str]) -> Result<(), String> {
        let protocol = remote.split_once("://").map_or("http", |(protocol, _)| protocol);
        let allowed = format!("protocol.{protocol}.allow=always");
        let mut arguments = vec!["-c", "protocol.allow=never", "-c", &allowed];
        arguments.extend([
            "submodule",
            "--quiet",
            "update",
            "--checkout",
            "--force",
            "--depth",
            "1",
        ]);
        arguments.extend(what);
        self.run_for(FETCH_TIMEOUT, folder, &arguments).await.map(drop)
    }
}

/// A checkout, or a submodule whose own submodules are next.
#[derive(Clone, Copy)]
struct Level<'a> {
    folder: &'a str,
    url: Option<&'a str>,
    depth: usize,
}

/// The sections of a `.gitmodules`. What is written in an unusual way is left out; git may read
/// more, but has no URL for it.
fn parse(text: &str) -> Vec<Declared> {
    let mut all: Vec<Declared> = Vec::new();
    let mut open = false;
    for line in text.lines().map(str::trim) {
        if line.starts_with('[') {
            let name = line.strip_prefix("[submodule \"").and_then(|rest| rest.strip_suffix("\"]"));
            open = name.is_some();
            all.extend(name.map(|name| Declared { name: name.to_owned(), ..Declared::default() }));
        } else if let (true, Some(last), Some((key, value))) =
            (open, all.last_mut(), line.split_once('='))
        {
            match key.trim().to_ascii_lowercase().as_str() {
                "path" => last.path = value.trim().to_owned(),
                "url" => last.url = value.trim().to_owned(),
                _ => {}
            }
        }
    }
    all
}

/// Where a submodule is fetched from, or why it is not, with the next command.
fn judge(
    declared: &Declared,
    parent: Option<&str>,
    sources: Sources<'_>,
) -> Result<Source, String> {
    if !is_plain_path(&declared.name) {
        return Err("its name is refused; rename it in .gitmodules".to_owned());
    }
    if !is_plain_path(&declared.path) {
        return Err("its path is refused; move it to a plain folder in .gitmodules".to_owned());
    }
    let shown = printable(&declared.url);
    let url = absolute(&declared.url, parent).ok_or_else(|| {
        format!("its URL `{shown}` is refused; use https://HOST/PATH, git@HOST:PATH or ../PATH")
    })?;
    let is_same = |checkout: &&Checkout| {
        checkout.url.as_deref().is_some_and(|known| is_same_url(&lower_host(known), &url))
    };
    if let Some(checkout) = sources.checkouts.iter().find(is_same) {
        return Ok(Source { url, remote: checkout.remote.clone() });
    }
    let public = url.strip_prefix("https://").and_then(|rest| rest.split_once('/'));
    match public.filter(|(host, _)| sources.hosts.iter().any(|known| known == host)) {
        Some((host, path)) => {
            let remote = format!("{}/{path}", public_git_url(host));
            Ok(Source { url, remote })
        }
        None => Err(format!(
            "{url} is neither a repository of this session nor on a host of `git_hosts`; \
             `harvest run -r THIS -r {url}` gives it to a session"
        )),
    }
}

/// The URL of a repository over HTTP; `None` for all that git would understand in another way.
fn absolute(url: &str, parent: Option<&str>) -> Option<String> {
    let url = match url.strip_prefix("git://") {
        Some(rest) => format!("https://{rest}"),
        None => of_ssh(url).unwrap_or_else(|| url.to_owned()),
    };
    let (scheme, host, path) = match split(&url) {
        Some((scheme, host, path)) => (scheme, host, path.to_owned()),
        None if url.starts_with("./") || url.starts_with("../") => {
            let (scheme, host, path) = split(parent?)?;
            (scheme, host, join(path, &url)?)
        }
        None => return None,
    };
    let is_host = host.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".-:".contains(&byte));
    let is_plain = is_host && !host.starts_with(['-', '.', ':']) && is_plain_path(&path);
    is_plain.then(|| format!("{scheme}://{}/{path}", host.to_ascii_lowercase()))
}

/// Scheme, host and path of an HTTP URL.
fn split(url: &str) -> Option<(&str, &str, &str)> {
    let (scheme, rest) = url.split_once("://")?;
    let (host, path) = rest.split_once('/')?;
    ["https", "http"].contains(&scheme).then_some((scheme, host, path.trim_end_matches('/')))
}

/// A path relative to a repository's, as git joins them.
fn join(path: &str, relative: &str) -> Option<String> {
    let mut segments: Vec<&str> = path.split('/').collect();
    for segment in relative.trim_end_matches('/').split('/') {
        match segment {
            "." => {}
            ".." => drop(segments.pop()?),
            other => segments.push(other),
        }
    }
    Some(segments.join("/"))
}

fn lower_host(url: &str) -> String {
    match split(url) {
        Some((scheme, host, path)) => format!("{scheme}://{}/{path}", host.to_ascii_lowercase()),
        None => url.to_owned(),
    }
}

/// A relative path that means the same to every program: no way up, no option, nothing that a
/// server decodes, and nothing of git's own folder.
fn is_plain_path(path: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._~+-".contains(&byte);
    let is_plain = |segment: &str| {
        !matches!(segment, "" | "." | "..")
            && !segment.starts_with('-')
            && !segment.eq_ignore_ascii_case(".git")
            && segment.bytes().all(plain)
    };
    path.len() <= 500 && path.split('/').all(is_plain)
}

/// A text of the repository for a message.
fn printable(text: &str) -> String {
    let mut shown = String::new();
    for c in text.chars().take(100) {
        match c.is_control() || c == '`' {
            true => drop(write!(shown, "{}", c.escape_unicode())),
            false => shown.push(c),
        }
    }
    shown
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn checkout(name: &str, url: &str) -> Checkout {
        let name: harvest_proto::RepositoryName = name.parse().unwrap();
        Checkout {
            folder: name.folder(),
            remote: format!("http://git.harvest.internal/{name}.git"),
            url: Some(url.to_owned()),
            name,
            base: None,
            branch: None,
            clone_missing: false,
        }
    }

    fn source(url: &str, parent: &str) -> Result<Source, String> {
        let checkouts = [checkout("acme/lib", "https://git.example.org/acme/lib.git")];
        let hosts = ["github.com".to_owned()];
        let sources = Sources { checkouts: &checkouts, hosts: &hosts };
        let (name, path) = ("libs/x".to_owned(), "libs/x".to_owned());
        judge(&Declared { name, path, url: url.to_owned() }, Some(parent), sources)
    }

    #[test]
    fn own_and_public_repositories_use_the_door() {
        let own = "http://git.harvest.internal/acme/lib.git";
        let public = "http://git.harvest.internal/public/github.com/a/b.git";
        let (here, there) = ("https://git.example.org/acme/app.git", "https://github.com/a/app");
        for (url, parent, remote) in [
            ("https://git.example.org/acme/lib", here, own),
            ("https://GIT.example.org/acme/lib.git/", here, own),
            ("git@git.example.org:acme/lib.git", here, own),
            ("ssh://git@git.example.org:22/acme/lib.git", here, own),
            ("../lib.git", here, own),
            ("./../../acme/lib.git", here, own),
            ("https://github.com/a/b.git", here, public),
            ("git@github.com:a/b.git", here, public),
            ("git://github.com/a/b.git", here, public),
            ("../b.git", there, public),
        ] {
            assert_eq!(
                source(url, parent).map(|found| found.remote).as_deref(),
                Ok(remote),
                "{url}"
            );
        }
    }

    #[test]
    fn hostile_submodules_are_refused() {
        let parent = "https://git.example.org/acme/app.git";
        for url in [
            "ext::sh -c evil",
            "file:///etc",
            "/etc",
            "--upload-pack=evil",
            "-u./evil",
            "lib.git",
            "../../../../lib.git",
            "https://token@github.com/a/b",
            "https://github.com/a/../b",
            "https://github.com/a/%2e%2e/b",
            "https://github.com/",
            "https://127.0.0.1/a/b",
            "https://github.com.evil.org/a/b",
            "git@github.com:-x/b",
            "",
        ] {
            assert!(source(url, parent).is_err(), "{url}");
        }
        let sources = Sources { checkouts: &[], hosts: &["github.com".to_owned()] };
        let url = "https://github.com/a/b".to_owned();
        for path in ["..", "../x", "/x", "a/../b", ".git", "a/.GIT/hooks", "-x", "a\nb", "", "a//b"]
        {
            let (name, path) = ("x".to_owned(), path.to_owned());
            let one = Declared { name: path.clone(), path: name.clone(), url: url.clone() };
            assert!(judge(&one, None, sources).is_err(), "name {path:?}");
            let one = Declared { name, path: path.clone(), url: url.clone() };
            assert!(judge(&one, None, sources).is_err(), "path {path:?}");
        }
    }

    #[test]
    fn sections_of_submodules_are_parsed() {
        let text = "[core]\n\tpath = no\n[submodule \"libs/x\"]\n\tpath = libs/x\n\tURL = ../x.git\n\
                    \tupdate = !evil\n[submodule \"y\"]\npath=y\n[broken\nurl = z\n";
        let declared = |name: &str, path: &str, url: &str| Declared {
            name: name.to_owned(),
            path: path.to_owned(),
            url: url.to_owned(),
        };
        assert_eq!(parse(text), [declared("libs/x", "libs/x", "../x.git"), declared("y", "y", "")]);
    }

    proptest! {
        #[test]
        fn every_source_is_at_the_door(url in "(https://|git@|\\.\\./|ext::|-)?[a-zA-Z./:@%-]{0,30}") {
            if let Ok(found) = source(&url, "https://github.com/acme/app") {
                prop_assert!(found.remote.starts_with("http://git.harvest.internal/"));
                prop_assert!(!found.remote.contains("..") && !found.remote.contains('%'));
            }
        }
    }
}
