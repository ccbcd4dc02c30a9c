//! Sessions that agents create for parts of their work. They have no more rights than their parent:
//! its author, agent, model and network policy, and registered repositories.

use harvest_proto::{
    SessionId,
    api::{CreateSession, Session, UseRepository},
};
use harvest_store::{ChildCounts, Lineage, SessionKey, SessionRecord, Write};

use super::{Sessions, create::PlannedSession};
use crate::{error::SessionError, tool_host::ChildSpec};

// Of the sessions below one that a user created.
const MAX_DEPTH: u32 = 2;
const MAX_ACTIVE: u64 = 5;
const MAX_CHILDREN: u64 = 15;

impl Sessions {
    /// Creates a child of a session, or returns the one that was created with the same key.
    pub(super) async fn spawn(
        &self,
        parent: &SessionId,
        child: ChildSpec,
    ) -> Result<Session, SessionError> {
        let store = &self.shared.store;
        let above = store.child_lineage(parent).await?;
        let root = above.as_ref().map_or_else(|| parent.clone(), |above| above.root.clone());
        let _one_at_a_time = self.shared.spawning.lock(&root).await;
        let record = store.session_get(parent).await?;
        let author = record.session.author.clone();
        let text = format!("{parent}/{}", child.key);
        let key = SessionKey { owner: author.email.clone(), text };
        if let Some(known) = store.session_by_key(&key).await? {
            // The call that created it may have failed before the driver was started.
            self.handle(&known).await?;
            return self.get(&known).await;
        }
        check_limits(depth(above.as_ref()) + 1, store.child_counts(&root).await?)?;
        let lineage = Lineage { parent: parent.clone(), root };
        let inherited = self.secrets_for(&record, &author).await?;
        let id = SessionId::random();
        // A rule that denies must not end at a session that the agent creates.
        let mut writes = vec![Write::ChildOf(lineage), Write::NetworkRulesOf(parent.clone())];
        writes.extend(self.inherited_writes(&id, &inherited)?);
        let new = PlannedSession { id, writes, secrets_of: Some(parent.clone()) };
        self.create_with(request(record, child, key.text), author, new).await
    }

    /// The session that a user created, above this one.
    pub(super) async fn root_of(&self, session: &SessionId) -> Result<SessionId, SessionError> {
        let lineage = self.shared.store.child_lineage(session).await?;
        Ok(lineage.map_or_else(|| session.clone(), |lineage| lineage.root))
    }
}

/// How many sessions are above one with this lineage.
fn depth(lineage: Option<&Lineage>) -> u32 {
    match lineage {
        None => 0,
        Some(lineage) if lineage.parent == lineage.root => 1,
        Some(_) => MAX_DEPTH,
    }
}

/// Refuses a child above the limits, with what the agent can do instead.
fn check_limits(depth: u32, counts: ChildCounts) -> Result<(), SessionError> {
    let what = if depth > MAX_DEPTH {
        "this session was created by one that was created itself; do this part of the work here"
            .to_owned()
    } else if counts.all >= MAX_CHILDREN {
        format!(
            "{MAX_CHILDREN} of {MAX_CHILDREN} sessions were created; do the rest of the work here"
        )
    } else if counts.active >= MAX_ACTIVE {
        format!(
            "{} of {MAX_ACTIVE} created sessions are at work; wait until one has ended \
             (session_status shows its state)",
            counts.active
        )
    } else {
        return Ok(());
    };
    Err(SessionError::invalid("child_limit", what))
}

fn request(record: SessionRecord, child: ChildSpec, key: String) -> CreateSession {
    let session = record.session;
    let same = record.checkouts.into_iter().next().map(|first| UseRepository {
        name: Some(first.repository.into()),
        url: None,
        base: first.base,
    });
    let other =
        child.repository.map(|name| UseRepository { name: Some(name), url: None, base: None });
    CreateSession {
        repositories: other.or(same).into_iter().collect(),
        prompt: Some(child.prompt),
        agent: Some(session.agent.clone()),
        model: session.model,
        effort: session.effort,
        network: Some(session.network),
        no_questions: record.no_questions,
        pr_mode: session.pr_mode,
        key: Some(key),
        ..CreateSession::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn created_sessions_are_limited() {
        let refused = |depth, all, active| {
            let refused = check_limits(depth, ChildCounts { all, active });
            refused.err().map(|error| error.to_string())
        };
        assert_eq!(refused(1, 0, 0), None);
        assert_eq!(refused(2, 14, 4), None);
        assert!(refused(3, 0, 0).unwrap().contains("created itself"));
        let all = refused(1, 15, 0).unwrap();
        assert_eq!(all, "15 of 15 sessions were created; do the rest of the work here");
        assert!(refused(1, 5, 5).unwrap().starts_with("5 of 5 created sessions are at work; wait"));
    }

    #[test]
    fn depth_follows_from_parent_and_root() {
        let [root, child] = [SessionId::random(), SessionId::random()];
        let below = |parent: &SessionId| Lineage { parent: parent.clone(), root: root.clone() };
        assert_eq!(depth(None), 0);
        assert_eq!(depth(Some(&below(&root))), 1);
        assert_eq!(depth(Some(&below(&child))), 2);
    }
}
