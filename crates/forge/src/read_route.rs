//! Reads of a repository below its path in GitHub's REST API. A route is parsed into segments and
//! parameters and built anew; only the parts of a repository that programs need to follow their
//! work are read: no settings, keys, hooks or secrets.

use crate::Operation;

const MAX_SEGMENTS: usize = 40;
const MAX_SEGMENT_BYTES: usize = 300;
const MAX_PARAMETERS: usize = 20;
const MAX_PARAMETER_BYTES: usize = 1000;

/// The longest answer: a page of a hundred pull requests with bodies has a few megabytes.
pub(crate) const MAX_READ_BYTES: usize = 8 << 20;

/// The first segments of routes, in the order of the refusal's text.
const READABLE: [&str; 15] = [
    "branches",
    "commits",
    "compare",
    "contents",
    "readme",
    "git",
    "tags",
    "releases",
    "pulls",
    "issues",
    "labels",
    "milestones",
    "check-runs",
    "check-suites",
    "actions",
];

/// The form of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ReadForm {
    #[default]
    Json,
    Diff,
    Patch,
    Raw,
}

impl ReadForm {
    /// The form that an `Accept` header asks for; JSON for every other.
    #[must_use]
    pub fn of(accept: &str) -> Self {
        let forms = [("diff", Self::Diff), ("patch", Self::Patch), ("raw", Self::Raw)];
        let wants = |form: &str| {
            accept.split(',').any(|kind| {
                let kind = kind.split(['+', ';']).next().unwrap_or_default().trim();
                let version = kind.strip_prefix("application/vnd.github.").unwrap_or_default();
                version.strip_prefix("v3.").unwrap_or(version) == form
            })
        };
        let found = forms.into_iter().find(|(name, _)| wants(name));
        found.map_or(Self::Json, |(_, form)| form)
    }

    pub(crate) const fn accept(self) -> &'static str {
        match self {
            Self::Json => "application/vnd.github+json",
            Self::Diff => "application/vnd.github.diff",
            Self::Patch => "application/vnd.github.patch",
            Self::Raw => "application/vnd.github.raw",
        }
    }
}

/// A route that may be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadRoute {
    segments: Vec<String>,
    pub(crate) query: Vec<(String, String)>,
    pub(crate) form: ReadForm,
}

/// A route that is not read, and why.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RouteRefusal {
    #[error("the path or the query is not valid")]
    Invalid,
    #[error("`{0}` of a repository is not read here; what is: {list}", list = READABLE.join(", "))]
    NotReadable(String),
    #[error("`{0}` also shows other repositories, and is not read here")]
    Foreign(String),
    #[error("logs and archives are files at another host; `gh run view ID` shows the jobs")]
    Elsewhere,
}

impl ReadRoute {
    /// A route of decoded segments below the repository.
    ///
    /// # Errors
    /// When it is not one that may be read.
    pub fn new(
        segments: Vec<String>,
        query: Vec<(String, String)>,
        form: ReadForm,
    ) -> Result<Self, RouteRefusal> {
        let fits =
            |text: &str, max: usize| text.len() <= max && !text.chars().any(char::is_control);
        // A server may decode an encoded slash before it looks for `..`.
        let is_plain = |segment: &String| {
            segment.split('/').all(|part| !matches!(part, "" | "." | ".."))
                && fits(segment, MAX_SEGMENT_BYTES)
        };
        let is_short = |(name, value): &(String, String)| {
            fits(name, MAX_PARAMETER_BYTES) && fits(value, MAX_PARAMETER_BYTES)
        };
        let is_valid = segments.len() <= MAX_SEGMENTS
            && query.len() <= MAX_PARAMETERS
            && segments.iter().all(is_plain)
            && query.iter().all(is_short);
        if !is_valid {
            return Err(RouteRefusal::Invalid);
        }
        judge(&segments)?;
        Ok(Self { segments, query, form })
    }

    /// A route of the program's own, in JSON.
    pub(crate) fn own(segments: &[&str], query: &[(&str, &str)]) -> Self {
        Self {
            segments: segments.iter().map(|one| (*one).to_owned()).collect(),
            query: query.iter().map(|(n, v)| ((*n).to_owned(), (*v).to_owned())).collect(),
            form: ReadForm::Json,
        }
    }

    /// The path below the repository, encoded, with a slash before each segment.
    pub(crate) fn path(&self) -> String {
        let mut path = String::new();
        for segment in &self.segments {
            path.push('/');
            for byte in segment.bytes() {
                if byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte) {
                    path.push(char::from(byte));
                } else {
                    path.push_str(&format!("%{byte:02X}"));
                }
            }
        }
        path
    }

    /// What the forge's credential must be for.
    pub(crate) fn operation(&self) -> Operation {
        let segment = |at: usize| self.segments.get(at).map_or("", String::as_str);
        match (segment(0), self.segments.last().map_or("", String::as_str)) {
            ("commits", "status" | "statuses") => Operation::Statuses,
            ("commits", "check-runs" | "check-suites") | ("check-runs" | "check-suites", _) => {
                Operation::Checks
            }
            ("actions", _) => Operation::Actions,
            ("pulls" | "issues" | "labels" | "milestones", _) => Operation::PullRequests,
            _ => Operation::Fetch,
        }
    }
}

/// Whether these parts of a repository are read. A server may take an encoded slash for one that
/// separates segments.
fn judge(segments: &[String]) -> Result<(), RouteRefusal> {
    let parts: Vec<&str> = segments.iter().flat_map(|segment| segment.split('/')).collect();
    let not_readable = |count: usize| {
        Err(RouteRefusal::NotReadable(
            parts.iter().take(count).copied().collect::<Vec<_>>().join("/"),
        ))
    };
    match parts[..] {
        [] => Ok(()),
        [first, ..] if !READABLE.contains(&first) => not_readable(2),
        ["actions", second, ..] if ["runs", "jobs", "workflows"].contains(&second) => {
            match parts[2..] {
                // Environments and who may release to them.
                [_, "pending_deployments" | "approvals" | "deployment_protection_rule", ..] => {
                    not_readable(4)
                }
                [.., "logs" | "zip"] => Err(RouteRefusal::Elsewhere),
                _ => Ok(()),
            }
        }
        ["actions", ..] => not_readable(2),
        // Who may push. Names of branches contain slashes.
        ["branches", _, ref more @ ..] if more.contains(&"protection") => not_readable(usize::MAX),
        // `OWNER:BRANCH` is a branch of a fork, or of the repository that this one was forked from.
        ["compare", ref compared @ ..] if compared.iter().any(|part| part.contains(':')) => {
            Err(RouteRefusal::Foreign(parts.join("/")))
        }
        // The others list issues that refer to it, or that it belongs to, from anywhere.
        ["issues", number, tail, ..]
            if number != "comments" && !["comments", "labels", "reactions"].contains(&tail) =>
        {
            Err(RouteRefusal::Foreign(format!("issues/{number}/{tail}")))
        }
        ["issues", "events", ..] => Err(RouteRefusal::Foreign("issues/events".to_owned())),
        _ => Ok(()),
    }
}

/// The answer to a read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadAnswer {
    /// 200, or a status that concerns the request alone, such as 404.
    pub status: u16,
    pub body: Vec<u8>,
    /// The parameters of the next page of a list.
    pub next: Option<Vec<(String, String)>>,
}

/// The parameters of the next page that a `Link` header names. Its URL is not used: GitHub's has
/// another path.
pub(crate) fn next_page(link: &str) -> Option<Vec<(String, String)>> {
    let next = link.split(',').find(|part| part.contains("rel=\"next\""))?;
    let url = next.split_once('<')?.1.split_once('>')?.0;
    let url: reqwest::Url = url.parse().ok()?;
    Some(url.query_pairs().into_owned().collect())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn route(path: &str) -> Result<ReadRoute, RouteRefusal> {
        let segments = path.split('/').filter(|one| !one.is_empty()).map(str::to_owned).collect();
        ReadRoute::new(segments, Vec::new(), ReadForm::Json)
    }

    #[test]
    fn only_parts_that_programs_follow_are_read() {
        for path in ["", "pulls/3/files", "branches/a/b", "actions/runs", "commits/main/status"] {
            assert!(route(path).is_ok(), "{path}");
        }
        for path in [
            "hooks",
            "keys",
            "collaborators",
            "actions/secrets",
            "actions",
            "environments/x/secrets",
            "zipball",
            "pulls/../hooks",
            "actions/runs/1/logs",
        ] {
            assert!(route(path).is_err(), "{path}");
        }
        for path in [
            "branches/main/protection",
            "branches/a/b/protection/required_status_checks",
            "actions/runs/1/pending_deployments",
            "actions/runs/1/approvals",
        ] {
            assert!(matches!(route(path), Err(RouteRefusal::NotReadable(_))), "{path}");
        }
        // `gh run view` reads the names of the artifacts.
        assert!(route("actions/runs/1/artifacts").is_ok());
        let encoded = vec!["branches".to_owned(), "main/protection".to_owned()];
        assert!(ReadRoute::new(encoded, Vec::new(), ReadForm::Json).is_err());
        for segment in ["..", "../../hooks", "a/../..", "a//b", "/a", "a/.", "a\nb"] {
            let segments = vec!["contents".to_owned(), segment.to_owned()];
            let refused = ReadRoute::new(segments, Vec::new(), ReadForm::Json);
            assert_eq!(refused, Err(RouteRefusal::Invalid), "{segment:?}");
        }
        let refused = route("hooks/1").unwrap_err().to_string();
        assert!(refused.starts_with("`hooks/1` of a repository is not read here"), "{refused}");
    }

    #[test]
    fn other_repositories_are_not_read() {
        for path in [
            "compare/main...alice:secret",
            "compare/alice:shop:main...main",
            "compare/main...alice:a/b",
            "issues/3/timeline",
            "issues/3/parent",
            "issues/3/sub_issues",
            "issues/3/dependencies/blocked_by",
            "issues/3/events",
            "issues/events",
            "issues/events/9",
        ] {
            assert!(matches!(route(path), Err(RouteRefusal::Foreign(_))), "{path}");
        }
        for path in [
            "compare/main...a/b",
            "issues",
            "issues/3",
            "issues/3/comments",
            "issues/comments/9/reactions",
        ] {
            assert!(route(path).is_ok(), "{path}");
        }
        let refused = route("issues/3/timeline").unwrap_err().to_string();
        assert!(refused.starts_with("`issues/3/timeline` also shows"), "{refused}");
    }

    #[test]
    fn reads_use_the_least_credential() {
        for (path, operation) in [
            ("commits/abc/status", Operation::Statuses),
            ("commits/abc/check-runs", Operation::Checks),
            ("commits/abc", Operation::Fetch),
            ("actions/runs", Operation::Actions),
            ("issues/3/comments", Operation::PullRequests),
        ] {
            assert_eq!(route(path).unwrap().operation(), operation, "{path}");
        }
    }

    #[test]
    fn forms_are_recognised_by_the_whole_type() {
        for (accept, form) in [
            ("application/vnd.github.v3.diff; charset=utf-8", ReadForm::Diff),
            ("application/json, application/vnd.github.raw+json", ReadForm::Raw),
            ("application/vnd.github.merge-info-preview+json", ReadForm::Json),
            ("text/x-diff", ReadForm::Json),
        ] {
            assert_eq!(ReadForm::of(accept), form, "{accept}");
        }
    }

    #[test]
    fn next_page_keeps_parameters_only() {
        let link = "<https://api.github.com/repositories/1/pulls?page=1>; rel=\"prev\", \
                    <https://evil.example/other?per_page=2&page=3>; rel=\"next\"";
        let next = next_page(link).unwrap();
        assert_eq!(next, [("per_page", "2"), ("page", "3")].map(|(n, v)| (n.into(), v.into())));
        assert_eq!(next_page("<x>; rel=\"last\""), None);
    }

    proptest! {
        #[test]
        fn built_paths_stay_below_the_repository(below in prop::collection::vec(".{0,12}", 0..5)) {
            let segments = [vec!["contents".to_owned()], below].concat();
            if let Ok(route) = ReadRoute::new(segments.clone(), Vec::new(), ReadForm::Json) {
                let path = route.path();
                prop_assert_eq!(path.matches('/').count(), segments.len());
                let plain = |c: char| c.is_ascii_alphanumeric() || "-_.~/%".contains(c);
                prop_assert!(path.chars().all(plain));
                prop_assert!(!path.split('/').any(|one| one == "." || one == ".."));
            }
        }
    }
}
