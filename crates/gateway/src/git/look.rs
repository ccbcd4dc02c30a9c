//! Asks a repository's remote from the host, with the same credentials and limits as the git door:
//! whether it is a git repository, and at which commit a branch is. Reads no objects.

use std::time::Duration;

use harvest_proto::SecretOwner;
use http_body_util::BodyExt;
use hyper::{
    HeaderMap, Response,
    header::{self, HeaderValue},
};

use super::{GIT_PROTOCOL, GitRequest, Remote};
use crate::{
    Gateway, Shared,
    http::{self, Body},
    ledger::GitAccess,
};

// Creating a session waits for the answer.
const LIMIT: Duration = Duration::from_secs(20);

// One branch, and those that start with its name.
const MAX_REFS_BYTES: usize = 1024 * 1024;

const ADVERTISEMENT: &str = "application/x-git-upload-pack-advertisement";
const LS_REFS: &str = "application/x-git-upload-pack-request";

impl Gateway {
    /// Checks that a repository's URL is the remote of one, with the secrets of these owners.
    ///
    /// # Errors
    /// A sentence that says what the remote answered, or that it did not.
    pub async fn check_remote(
        &self,
        access: &GitAccess,
        owners: &[SecretOwner],
    ) -> Result<(), String> {
        let look = async {
            let remote = Remote::resolve(&self.shared, access, owners, false).await?;
            remote.send(&self.shared, GitRequest::FetchInfo, version_2(), None).await
        };
        let answered = match tokio::time::timeout(LIMIT, look).await {
            Ok(Ok(answered)) => answered,
            Ok(Err(refused)) => return Err(text_of(refused).await),
            Err(_) => return Err(format!("no answer after {} s", LIMIT.as_secs())),
        };
        let kind = answered.headers().get(header::CONTENT_TYPE).map(HeaderValue::as_bytes);
        if kind == Some(ADVERTISEMENT.as_bytes()) {
            return Ok(());
        }
        Err("a web page answers there, not a git repository".to_owned())
    }

    /// The commit of the remote's branch, or of its default branch; `Some(None)` when it has no
    /// such branch, and `None` when it did not say.
    pub async fn tip(
        &self,
        access: &GitAccess,
        owners: &[SecretOwner],
        branch: Option<&str>,
    ) -> Option<Option<String>> {
        let reference = branch.map_or("HEAD".to_owned(), |branch| format!("refs/heads/{branch}"));
        let resolve = Remote::resolve(&self.shared, access, owners, false);
        let remote = tokio::time::timeout(LIMIT, resolve).await.ok()?.ok()?;
        tip(&self.shared, &remote, &reference).await
    }
}

/// As [`Gateway::tip`], of any reference.
pub(super) async fn tip(
    shared: &Shared,
    remote: &Remote,
    reference: &str,
) -> Option<Option<String>> {
    let look = async {
        let mut headers = version_2();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(LS_REFS));
        let body = Some(ls_refs(reference).into());
        let sent = remote.send(shared, GitRequest::Fetch, headers, body).await;
        let answered = http::read_text(sent.ok()?, MAX_REFS_BYTES).await;
        commit_of(&answered, reference)
    };
    tokio::time::timeout(LIMIT, look).await.ok().flatten()
}

/// Protocol 2 answers with its capabilities only; older ones list every reference.
fn version_2() -> HeaderMap {
    HeaderMap::from_iter([(GIT_PROTOCOL, HeaderValue::from_static("version=2"))])
}

async fn text_of(refused: Response<Body>) -> String {
    let bytes = refused.into_body().collect().await.map(|body| body.to_bytes()).unwrap_or_default();
    String::from_utf8_lossy(&bytes).trim_end().to_owned()
}

/// The request `ls-refs` of gitprotocol-v2.
fn ls_refs(reference: &str) -> String {
    let line = |text: String| format!("{:04x}{text}", text.len() + 4);
    let (command, prefix) =
        (line("command=ls-refs\n".into()), line(format!("ref-prefix {reference}\n")));
    format!("{command}0001{prefix}0000")
}

/// The commit of the reference in the answer to [`ls_refs`]; `None` for an incomplete or other
/// answer.
fn commit_of(answer: &str, reference: &str) -> Option<Option<String>> {
    let (mut rest, mut found) = (answer, None);
    loop {
        let length = usize::from_str_radix(rest.get(..4)?, 16).ok()?;
        if length == 0 {
            return Some(found);
        }
        let (id, name) = rest.get(4..length)?.trim_end().split_once(' ')?;
        let is_id = id.len() >= 40 && id.bytes().all(|byte| byte.is_ascii_hexdigit());
        if name == reference {
            found = Some(is_id.then(|| id.to_owned())?);
        }
        rest = rest.get(length..)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn branch_is_found_by_its_whole_name() {
        let answer = "0041c0ffeec0ffeec0ffeec0ffeec0ffeec0ffeec0ff refs/heads/main-old\n\
                      003dc0ffeec0ffeec0ffeec0ffeec0ffeec0ffeec0ff refs/heads/main\n0000";
        let commit = |branch: &str| commit_of(answer, &format!("refs/heads/{branch}"));
        let c0ffee = Some(Some("c0ffee".repeat(7)[..40].to_owned()));
        assert_eq!((commit("main"), commit("main-old")), (c0ffee.clone(), c0ffee));
        assert_eq!(commit("mai"), Some(None));
        assert_eq!(commit_of("0000", "HEAD"), Some(None));
    }

    #[test]
    fn other_answers_say_nothing_about_the_branch() {
        for answer in ["", "<html>", "000", "0040c0ffee", "0009ERR x\n", "ffff", "00é0"] {
            assert_eq!(commit_of(answer, "refs/heads/main"), None, "{answer}");
        }
    }

    #[test]
    fn request_names_one_branch() {
        let wanted = "0014command=ls-refs\n0001001cref-prefix refs/heads/x\n0000";
        assert_eq!(ls_refs("refs/heads/x"), wanted);
    }
}
