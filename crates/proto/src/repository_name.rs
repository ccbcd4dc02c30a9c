//! Names of repositories, how they are derived from URLs, and the folders of their checkouts.

use crate::text::{checked_text, quoted};

/// Maximum length of an owner and of a name.
pub const MAX_NAME_PART: usize = 100;

/// Owner of folders, of repositories on the local forge, and of URLs that name no owner.
pub const LOCAL_OWNER: &str = "local";

/// Folder in the sandbox that contains the checkouts.
pub const WORKSPACE: &str = "/workspace";

// Two parts, the hyphen between them and a number.
const MAX_CHECKOUT_FOLDER: usize = 2 * MAX_NAME_PART + 20;

checked_text!(
    /// Name of a repository: `OWNER/NAME`.
    RepositoryName, InvalidRepositoryName, check_name
);

/// The text is not a repository name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "invalid repository name `{0}`: use OWNER/NAME, each with 1 to {MAX_NAME_PART} letters, digits, \
     `-`, `_` or `.`, not starting with `.` or `-` and not ending in `.git`"
)]
pub struct InvalidRepositoryName(String);

impl RepositoryName {
    /// # Errors
    /// When one of the parts is not a valid name.
    pub fn new(owner: &str, name: &str) -> Result<Self, InvalidRepositoryName> {
        format!("{owner}/{name}").try_into()
    }

    /// The name of a folder or of a repository on the local forge: its owner is [`LOCAL_OWNER`].
    ///
    /// # Errors
    /// When the name is invalid.
    pub fn local(name: &str) -> Result<Self, InvalidRepositoryName> {
        Self::new(LOCAL_OWNER, name)
    }

    /// The name of the repository at an http or https URL: the last two segments of its path, so
    /// that `https://host/group/acme/app.git` is `acme/app`. The owner is [`LOCAL_OWNER`] when the
    /// path has one segment, and `~` before a user's name is dropped. `chosen` replaces the name,
    /// and the owner if it has one.
    ///
    /// # Errors
    /// When one of the parts is not a valid name.
    pub fn from_url(
        url: &str,
        chosen: Option<&RepositoryRef>,
    ) -> Result<Self, InvalidRepositoryName> {
        let (owner, name) = last_segments(url);
        Self::new(
            chosen.and_then(RepositoryRef::owner).unwrap_or(owner),
            chosen.map_or(name, RepositoryRef::name),
        )
    }

    /// The part before the slash.
    #[must_use]
    pub fn owner(&self) -> &str {
        self.parts().0
    }

    /// The part after the slash.
    #[must_use]
    pub fn name(&self) -> &str {
        self.parts().1
    }

    /// The folder of the repository's checkout in a sandbox without other repositories.
    #[must_use]
    pub fn folder(&self) -> CheckoutFolder {
        CheckoutFolder(self.name().to_owned())
    }

    fn parts(&self) -> (&str, &str) {
        self.0.split_once('/').expect("a valid name has a slash")
    }
}

fn check_name(text: &str) -> Result<(), InvalidRepositoryName> {
    let valid = text.split_once('/').is_some_and(|(owner, name)| is_part(owner) && is_part(name));
    valid.then_some(()).ok_or_else(|| InvalidRepositoryName(quoted(text)))
}

// Each part is a folder name and a segment of URLs.
fn is_part(text: &str) -> bool {
    (1..=MAX_NAME_PART).contains(&text.len()) && is_folder_name(text)
}

fn is_folder_name(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
        && !text.starts_with(['.', '-'])
        // URLs may add it.
        && !text.ends_with(".git")
}

fn last_segments(url: &str) -> (&str, &str) {
    let after_scheme = url.split_once("://").map_or(url, |(_, rest)| rest);
    let path = after_scheme.split_once('/').map_or("", |(_host, path)| path);
    let path = path.trim_end_matches('/').trim_end_matches(".git");
    let (before, name) = path.rsplit_once('/').unwrap_or(("", path));
    let owner = before.rsplit('/').next().unwrap_or_default().trim_start_matches('~');
    (if owner.is_empty() { LOCAL_OWNER } else { owner }, name)
}

checked_text!(
    /// A repository as a user names it: `OWNER/NAME`, or `NAME` where only one repository has it.
    RepositoryRef, InvalidRepositoryRef, check_ref
);

/// The text does not name a repository.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "invalid repository name `{0}`: use NAME or OWNER/NAME, each with 1 to {MAX_NAME_PART} letters, \
     digits, `-`, `_` or `.`, not starting with `.` or `-` and not ending in `.git`"
)]
pub struct InvalidRepositoryRef(String);

impl RepositoryRef {
    /// The owner, if the user gave one.
    #[must_use]
    pub fn owner(&self) -> Option<&str> {
        self.0.split_once('/').map(|(owner, _)| owner)
    }

    /// The name without the owner.
    #[must_use]
    pub fn name(&self) -> &str {
        self.0.rsplit('/').next().unwrap_or_default()
    }

    /// Whether this may mean `repository`.
    #[must_use]
    pub fn matches(&self, repository: &RepositoryName) -> bool {
        self.name() == repository.name()
            && self.owner().is_none_or(|owner| owner == repository.owner())
    }
}

impl From<RepositoryName> for RepositoryRef {
    fn from(name: RepositoryName) -> Self {
        Self(name.0)
    }
}

fn check_ref(text: &str) -> Result<(), InvalidRepositoryRef> {
    let valid = is_part(text) || check_name(text).is_ok();
    valid.then_some(()).ok_or_else(|| InvalidRepositoryRef(quoted(text)))
}

checked_text!(
    /// Name of a checkout's folder below [`WORKSPACE`].
    CheckoutFolder, InvalidCheckoutFolder, check_folder
);

/// The text is not the name of a checkout's folder.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("invalid checkout folder `{0}`")]
pub struct InvalidCheckoutFolder(String);

impl CheckoutFolder {
    /// The absolute path in the sandbox.
    #[must_use]
    pub fn path(&self) -> String {
        format!("{WORKSPACE}/{}", self.0)
    }
}

fn check_folder(text: &str) -> Result<(), InvalidCheckoutFolder> {
    let valid = (1..=MAX_CHECKOUT_FOLDER).contains(&text.len()) && is_folder_name(text);
    valid.then_some(()).ok_or_else(|| InvalidCheckoutFolder(quoted(text)))
}

/// The folders of a session's checkouts, in the order of the repositories: each has the
/// repository's name, or `OWNER-NAME` (with a number if need be) when an earlier one has that
/// folder.
#[must_use]
pub fn checkout_folders<'a>(
    repositories: impl IntoIterator<Item = &'a RepositoryName>,
) -> Vec<CheckoutFolder> {
    let mut folders: Vec<CheckoutFolder> = Vec::new();
    for repository in repositories {
        let long = format!("{}-{}", repository.owner(), repository.name());
        let numbered = (2..).map(|number| format!("{long}-{number}"));
        let mut all = [repository.name().to_owned(), long.clone()].into_iter().chain(numbered);
        let free = all.find(|name| folders.iter().all(|taken| taken != name.as_str()));
        folders.push(CheckoutFolder(free.expect("there are more numbers than folders")));
    }
    folders
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::text::tests::round_trip;

    const PART: &str = "[A-Za-z0-9_][A-Za-z0-9_-]{0,98}[a-z]";

    fn name(text: &str) -> RepositoryName {
        text.parse().unwrap()
    }

    proptest! {
        #[test]
        fn names_round_trip(owner in PART, name in PART) {
            let parsed = round_trip::<RepositoryName>(&format!("{owner}/{name}"));
            prop_assert_eq!((parsed.owner(), parsed.name()), (&owner[..], &name[..]));
            prop_assert_eq!(&RepositoryName::new(&owner, &name).unwrap(), &parsed);
            prop_assert!(round_trip::<RepositoryRef>(&name).matches(&parsed));
            prop_assert!(round_trip::<RepositoryRef>(&parsed).matches(&parsed));
        }

        #[test]
        fn valid_name_is_two_path_segments(text in "[a./_-]{0,8}|\\PC{0,8}") {
            if let Ok(name) = text.parse::<RepositoryName>() {
                for part in [name.owner(), name.name()] {
                    prop_assert!(!part.contains(['/', '\\', ' ']) && !part.starts_with(['.', '-']));
                    prop_assert!(!part.is_empty() && part.is_ascii());
                }
            }
        }

        #[test]
        fn checkout_folders_are_distinct_and_valid(
            names in prop::collection::vec("[ab](-[ab])?/[ab](-[ab])?(-2)?", 0..12),
        ) {
            let mut names: Vec<RepositoryName> = names.iter().map(|text| name(text)).collect();
            names.sort();
            names.dedup();
            let folders = checkout_folders(&names);
            prop_assert_eq!(names.first().map(RepositoryName::folder), folders.first().cloned());
            for (index, folder) in folders.iter().enumerate() {
                round_trip::<CheckoutFolder>(folder);
                prop_assert!(!folders[..index].contains(folder));
            }
        }
    }

    #[test]
    fn name_cannot_escape_its_folder() {
        let long = format!("a/{}", "x".repeat(101));
        for bad in ["", "a", "a/", "/a", "../a", "a/..", "a/.git", "a/b/c", "-a/b", "a/-rf", &long]
        {
            assert!(bad.parse::<RepositoryName>().is_err(), "{bad}");
        }
        for bad in ["", "..", "a/", "/a", "a b", "a.git", "a/b/c", &long] {
            assert!(bad.parse::<RepositoryRef>().is_err(), "{bad}");
        }
        round_trip::<RepositoryName>("vercel/next.js");
    }

    #[test]
    fn name_is_derived_from_url() {
        for (url, expected) in [
            ("https://host/acme/app", "acme/app"),
            ("https://host/acme/app.git/", "acme/app"),
            ("https://host:8443/group/acme/app.git", "acme/app"),
            ("https://host/~ada/app", "ada/app"),
            ("http://127.0.0.1:7070/app.git", "local/app"),
            ("http://127.0.0.1:7070/forge/local/app.git", "local/app"),
        ] {
            assert_eq!(RepositoryName::from_url(url, None).unwrap(), expected, "{url}");
        }
        for bad in
            ["https://host", "https://host/", "https://host/a%20b/app", "https://host/a/.git"]
        {
            assert!(RepositoryName::from_url(bad, None).is_err(), "{bad}");
        }
    }

    #[test]
    fn chosen_name_replaces_name_and_owner() {
        let derived = |url, chosen: &str| {
            RepositoryName::from_url(url, Some(&chosen.parse().unwrap())).unwrap()
        };
        assert_eq!(derived("https://host/acme/app", "web"), "acme/web");
        assert_eq!(derived("https://host/acme/app", "ada/web"), "ada/web");
        assert_eq!(derived("https://host/app", "web"), "local/web");
    }

    #[test]
    fn short_name_matches_any_owner() {
        let short: RepositoryRef = "app".parse().unwrap();
        let long: RepositoryRef = "a/app".parse().unwrap();
        assert!(short.matches(&name("a/app")) && short.matches(&name("b/app")));
        assert!(long.matches(&name("a/app")) && !long.matches(&name("b/app")));
        assert!(!short.matches(&name("app/a")));
    }

    #[test]
    fn second_checkout_of_a_name_gets_owner() {
        let names = ["a/app", "b/app", "x/b-app", "x-b/app", "c/web"].map(name);
        assert_eq!(checkout_folders(&names), ["app", "b-app", "x-b-app", "x-b-app-2", "web"]);
        assert_eq!(name("a/app").folder().path(), "/workspace/app");
    }
}
