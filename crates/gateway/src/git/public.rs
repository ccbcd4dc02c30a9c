//! Public repositories on the hosts of the setting `git_hosts`, for dependencies:
//! `http://git.harvest.internal/public/{host}/{path}`. They are fetched without credentials, under
//! every network policy but `none`, and cannot be pushed to. Git's configuration inside leads the
//! hosts' own URLs here.

use harvest_proto::door::GIT_NAME;
use hyper::{
    HeaderMap, Response, StatusCode,
    header::{self, HeaderValue},
    http::request::Parts,
};
use reqwest::Url;

use super::{GitRequest, Remote, refuse_private, remote_url};
use crate::{
    door::Door,
    http::{self, Body, Reach},
    ledger::GitAccess,
    policy::{self, Verdict},
};

const PREFIX: &str = "public";

/// A request for a repository on a public host.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct PublicRequest {
    host: String,
    url: Url,
    pub(super) wanted: GitRequest,
}

impl PublicRequest {
    /// The request of a path below [`PREFIX`].
    pub(super) fn find(hosts: &[String], parts: &Parts) -> Option<Self> {
        let path = parts.uri.path().strip_prefix('/')?.strip_prefix(PREFIX)?.strip_prefix('/')?;
        let (host, path) = path.split_once('/')?;
        let host = hosts.iter().find(|known| *known == host)?.clone();
        let (path, wanted) = GitRequest::ALL.into_iter().find_map(|wanted| {
            let (suffix, query, method) = wanted.route();
            let path = path.strip_suffix(suffix)?.strip_suffix('/')?;
            (parts.uri.query() == query && parts.method == method).then_some((path, wanted))
        })?;
        let url = Url::parse(&format!("https://{host}/{path}")).ok()?;
        path.split('/').all(is_plain_segment).then_some(Self { host, url, wanted })
    }

    /// The session's own repository at this URL, if there is one: it has credentials.
    pub(super) fn registered<'a>(&self, repositories: &'a [GitAccess]) -> Option<&'a GitAccess> {
        let same = |access: &&GitAccess| {
            remote_url::parse(&access.url).is_ok_and(|url| {
                url.host_str() == self.url.host_str()
                    && url.port_or_known_default() == self.url.port_or_known_default()
                    && repository_path(&url) == repository_path(&self.url)
            })
        };
        repositories.iter().find(same)
    }

    /// The remote, if the door's policy allows it.
    pub(super) async fn allowed(self, door: &Door) -> Result<Remote, Response<Body>> {
        let Self { host, url, wanted } = self;
        if matches!(wanted, GitRequest::Push | GitRequest::PushInfo) {
            let reason = "a push to a repository that is not one of this session's";
            door.log_refusal(&host, reason, None).await;
            let message = "only the session's own repositories can be pushed to; \
                `harvest run -r REPOSITORY` starts a session with one";
            return Err(http::text(StatusCode::FORBIDDEN, message));
        }
        let verdict = policy::judge_public_git(&door.network(), &host);
        if !matches!(verdict, Verdict::Allowed { .. }) {
            let reason = door.refuse(&host, 443, verdict).await;
            return Err(http::text(StatusCode::FORBIDDEN, &format!("{host}: {reason}")));
        }
        let name = format!("{host}{}", url.path());
        if remote_url::check_host(&url, &door.shared.config.private_hosts).is_err() {
            return Err(refuse_private(&name, &url));
        }
        // The bytes belong to the connection of the HTTP client, which other sessions share.
        drop(door.traffic.connected(&host, 443));
        Ok(Remote { name, url, reach: Reach::Public, credential: None })
    }
}

/// A redirect of a public host to a repository on one of the hosts, as git is to follow it.
pub(super) fn redirect(hosts: &[String], answered: &reqwest::Response) -> Option<Response<Body>> {
    let location = answered.headers().get(header::LOCATION)?.to_str().ok()?;
    let target = answered.url().join(location).ok().filter(|url| url.scheme() == "https")?;
    let host = hosts.iter().find(|known| target.host_str() == Some(known))?;
    let query = target.query().map_or_else(String::new, |query| format!("?{query}"));
    let inside = format!("http://{GIT_NAME}/{PREFIX}/{host}{}{query}", target.path());
    let location = (header::LOCATION, HeaderValue::from_str(&inside).ok()?);
    Some(http::response(answered.status(), HeaderMap::from_iter([location]), http::full("")))
}

/// The path of a repository; hosts answer for it with and without `.git`.
fn repository_path(url: &Url) -> &str {
    let path = url.path().trim_end_matches('/');
    path.strip_suffix(".git").unwrap_or(path)
}

// Nothing that a server could decode or resolve to another path.
fn is_plain_segment(segment: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._~+-".contains(&byte);
    !matches!(segment, "" | "." | "..") && segment.bytes().all(plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(method: &str, target: &str) -> Option<PublicRequest> {
        let request = hyper::Request::builder().method(method).uri(target).body(()).unwrap();
        PublicRequest::find(&["github.com".to_owned()], &request.into_parts().0)
    }

    #[test]
    fn only_git_requests_for_known_hosts_are_found() {
        let info = "/info/refs?service=git-upload-pack";
        let found = find("GET", &format!("/public/github.com/a/b.git{info}")).unwrap();
        assert_eq!(found.url.as_str(), "https://github.com/a/b.git");
        assert_eq!(found.wanted, GitRequest::FetchInfo);
        let push = find("POST", "/public/github.com/a/b/git-receive-pack").unwrap();
        assert_eq!(push.wanted, GitRequest::Push);
        for target in [
            "/public/evil.org/a/b",
            "/public/github.com.evil.org/a/b",
            "/public/github.com@evil.org/a/b",
            "/public/github.com:8443/a/b",
            "/public/github.com/../a",
            "/public/github.com/%2e%2e/a",
            "/public/github.com//a",
            "/public/github.com",
            "/github.com/a/b",
        ] {
            assert_eq!(find("GET", &format!("{target}{info}")), None, "{target}");
        }
        assert_eq!(find("GET", "/public/github.com/a/b/raw/main/x"), None);
        assert_eq!(find("POST", &format!("/public/github.com/a/b{info}")), None);
    }

    #[test]
    fn own_repository_is_found_by_its_url() {
        let access = |url: &str| GitAccess {
            name: "acme/shop".parse().unwrap(),
            url: url.to_owned(),
            local: false,
            secret: None,
            branch: None,
        };
        let info = "/info/refs?service=git-upload-pack";
        let request = find("GET", &format!("/public/github.com/acme/shop{info}")).unwrap();
        for (url, same) in [
            ("https://github.com/acme/shop.git", true),
            ("https://GitHub.com:443/acme/shop/", true),
            ("https://github.com/acme/shop2", false),
            ("https://github.com:8443/acme/shop", false),
            ("https://gitlab.com/acme/shop", false),
        ] {
            assert_eq!(request.registered(&[access(url)]).is_some(), same, "{url}");
        }
    }
}
