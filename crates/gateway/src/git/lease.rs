//! What a push may do to the session's branch: create it, move it forward, or replace what this
//! session itself pushed. Commits of other people are never replaced. A commit that is replaced
//! stays at the remote, below `refs/harvest/kept/`, which ordinary clones and fetches leave out.

use bytes::BytesMut;
use harvest_proto::BranchName;
use http_body_util::BodyExt;
use hyper::{
    HeaderMap, Response,
    body::Incoming,
    header::{self, HeaderValue},
};
use tokio::time::{Instant, timeout_at};

use super::{
    GitRequest, Remote,
    ancestry::{AncestryProof, Descent},
    look,
    pktline::{Command, Report, set_reference},
};
use crate::{
    door::Door,
    http::{self, Body},
    ledger::{BegunPush, GitAccess, Refusal},
};

const KEPT: &str = "refs/harvest/kept/";
const PUSH_TYPE: &str = "application/x-git-receive-pack-request";
const MAX_REPORT_BYTES: usize = 64 * 1024;

/// What a push does to its branch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BranchUpdate {
    Create,
    Forward,
    /// Takes commits off the branch that this session pushed.
    Replace,
}

/// What is known of a push when it is judged.
#[derive(Debug)]
struct PushFacts<'a> {
    command: &'a Command,
    branch: &'a str,
    /// A commit that the branch is at, instead of the one that the push expects, and that this
    /// session did not push.
    theirs: Option<&'a str>,
    /// Whether the new commit descends from the old one.
    descends: bool,
    /// Whether this session pushed the old commit.
    is_own: bool,
}

/// The error is the reason of the refusal, for git and the user.
fn judge(facts: &PushFacts<'_>) -> Result<BranchUpdate, String> {
    let PushFacts { command, branch, theirs, descends, is_own } = facts;
    let refused = |commit: &str| {
        let commit: String = commit.chars().take(7).collect();
        Err(format!(
            "the branch is at {commit}, which this session did not push; keep it: git fetch \
             origin, git rebase origin/{branch}, then push again"
        ))
    };
    match theirs {
        Some(theirs) => refused(theirs),
        None if command.creates() => Ok(BranchUpdate::Create),
        None if *descends => Ok(BranchUpdate::Forward),
        None if *is_own => Ok(BranchUpdate::Replace),
        None => refused(&command.old),
    }
}

/// A push whose commands are in order, before anything of it reaches the remote.
pub(super) struct Lease<'a> {
    pub(super) door: &'a Door,
    pub(super) access: &'a GitAccess,
    pub(super) branch: &'a BranchName,
    pub(super) command: &'a Command,
    pub(super) remote: &'a Remote,
}

impl Lease<'_> {
    /// Judges the push; reads as much of its pack as that takes. `head` is what was read of the
    /// body, with the pack's beginning at `pack`.
    pub(super) async fn check(
        &self,
        (head, pack): (&mut BytesMut, usize),
        body: &mut Incoming,
        until: Instant,
    ) -> Result<BranchUpdate, String> {
        let Self { branch, command, .. } = self;
        let tip = look::tip(&self.door.shared, self.remote, &format!("refs/heads/{branch}")).await;
        // A remote that does not say compares by itself when it takes the push.
        let other = tip.flatten().filter(|tip| *tip != command.old);
        let theirs = match other {
            Some(tip) if !self.is_own(&tip).await? => Some(tip),
            _ => None,
        };
        let descends = !command.creates() && theirs.is_none() && {
            let proofs = timeout_at(until, self.door.push_proofs.acquire()).await;
            let _permit = proofs.map_err(|_| "another push of this session is in progress")?;
            descends(command, (head, pack), body, until).await?
        };
        let is_own = !descends && !command.creates() && self.is_own(&command.old).await?;
        let theirs = theirs.as_deref();
        judge(&PushFacts { command, branch, theirs, descends, is_own })
    }

    async fn is_own(&self, commit: &str) -> Result<bool, String> {
        let (session, repository) = (&self.door.policy.session, &self.access.name);
        let known = self.door.shared.ledger.has_pushed(session, repository, commit).await;
        known.map_err(|refusal| refusal.to_string())
    }

    /// Records that the push begins, and keeps at the remote what it replaces.
    pub(super) async fn begin(&self, update: BranchUpdate) -> Result<(), String> {
        let (session, repository) = (&self.door.policy.session, &self.access.name);
        let Command { old, new, .. } = self.command;
        let push = BegunPush { old, new, replaces: update == BranchUpdate::Replace };
        let ledger = &self.door.shared.ledger;
        ledger
            .push_begins(session, repository, push)
            .await
            .map_err(|refusal: Refusal| refusal.to_string())?;
        if !push.replaces {
            return Ok(());
        }
        let kept = self.keep(old).await;
        if kept.is_err() {
            self.refused().await;
        }
        kept
    }

    /// Records that the remote refused the push.
    pub(super) async fn refused(&self) {
        let (session, repository) = (&self.door.policy.session, &self.access.name);
        self.door.shared.ledger.push_refused(session, repository, &self.command.new).await;
    }

    /// Makes the remote keep a commit that it has.
    async fn keep(&self, commit: &str) -> Result<(), String> {
        let reference = format!("{KEPT}{commit}");
        let mut why = String::new();
        // The second time as an update that changes nothing: it was kept before.
        for old in [None, Some(commit)] {
            let kind = (header::CONTENT_TYPE, HeaderValue::from_static(PUSH_TYPE));
            let body = set_reference(&reference, old, commit);
            let headers = HeaderMap::from_iter([kind]);
            let sent = self
                .remote
                .send(&self.door.shared, GitRequest::Push, headers, Some(body.into()))
                .await;
            let answered = match sent {
                Ok(answered) => http::read_text(answered, MAX_REPORT_BYTES).await,
                Err(refused) => text_of(refused).await,
            };
            let mut report = Report::plain();
            report.observe(answered.as_bytes());
            if report.accepted(&reference) == Some(true) {
                return Ok(());
            }
            why = self.remote.redact(&answered);
        }
        tracing::warn!(repository = %self.access.name, commit, why, "cannot keep a commit");
        Err(format!(
            "the remote does not keep the commit that would be replaced ({reference}); rebase onto \
             origin/{} instead",
            self.branch
        ))
    }
}

/// Whether the new commit descends from the old one, as the pack shows.
async fn descends(
    command: &Command,
    (head, pack): (&mut BytesMut, usize),
    body: &mut Incoming,
    until: Instant,
) -> Result<bool, String> {
    let (mut proof, mut has_ended) = (AncestryProof::new(&command.old, &command.new), false);
    loop {
        if has_ended || proof.is_due(head.len().saturating_sub(pack)) {
            // Megabytes are inflated and hashed.
            let bytes = std::mem::take(head);
            let reading = tokio::task::spawn_blocking(move || {
                let descent = proof.read(bytes.get(pack..).unwrap_or_default());
                (proof, bytes, descent)
            });
            let (read, bytes, descent) =
                reading.await.map_err(|_| "the commits of the push cannot be read")?;
            (proof, *head) = (read, bytes);
            match descent {
                Descent::Proven => return Ok(true),
                Descent::Unproven => return Ok(false),
                Descent::NeedsMore if has_ended => return Ok(false),
                Descent::NeedsMore => {}
            }
        }
        match timeout_at(until, body.frame()).await {
            Ok(Some(Ok(frame))) => {
                head.extend_from_slice(&frame.into_data().unwrap_or_default());
            }
            _ => has_ended = true,
        }
    }
}

async fn text_of(refused: Response<Body>) -> String {
    let bytes = refused.into_body().collect().await.map(|body| body.to_bytes()).unwrap_or_default();
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn command(old: &str) -> Command {
        Command { old: old.repeat(40), new: "2".repeat(40), reference: "refs/heads/b".to_owned() }
    }

    #[test]
    fn commits_of_others_are_named_with_next_command() {
        let (command, theirs) = (command("a"), "c0ffee".repeat(6));
        let facts = |theirs| PushFacts {
            command: &command,
            branch: "b",
            theirs,
            descends: false,
            is_own: false,
        };
        let refused = judge(&facts(Some(&theirs))).unwrap_err();
        assert!(
            refused.contains("c0ffeec,") && refused.contains("git rebase origin/b"),
            "{refused}"
        );
        assert!(judge(&facts(None)).unwrap_err().contains("aaaaaaa,"));
    }

    proptest! {
        #[test]
        fn only_own_commits_are_replaced(
            creates in any::<bool>(),
            theirs in any::<bool>(),
            descends in any::<bool>(),
            is_own in any::<bool>(),
        ) {
            let command = command(if creates { "0" } else { "a" });
            let theirs = theirs.then_some("c0ffee");
            let facts = PushFacts { command: &command, branch: "b", theirs, descends, is_own };
            match judge(&facts) {
                Ok(BranchUpdate::Create) => prop_assert!(creates && theirs.is_none()),
                Ok(BranchUpdate::Forward) => prop_assert!(descends && theirs.is_none()),
                Ok(BranchUpdate::Replace) => {
                    prop_assert!(is_own && !descends && !creates && theirs.is_none());
                }
                Err(_) => prop_assert!(theirs.is_some() || !(creates || descends || is_own)),
            }
        }
    }
}
