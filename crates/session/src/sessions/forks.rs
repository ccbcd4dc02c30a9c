//! Forks: sessions that continue from a turn of another session, files and conversation included,
//! each on its own branch. A request creates all of its forks or none.

use harvest_proto::{
    Event, EventBody, SecretOwner, SessionId, SnapshotId, Timestamp,
    api::{ForkSession, Session, Snapshot, Turn},
    bridge::Author,
};
use harvest_store::{CheckoutRecord, NewCheckout, NewPrompt, NewSession, SessionRecord, Write};

use super::{SessionInsert, Sessions, branch, verbs::new_prompt};
use crate::{
    decide::State,
    driver::{mask_prompt, title},
    error::SessionError,
    repositories::shared_owners,
    wall_clock::now,
};

/// The most forks of one request.
pub const MAX_FORKS: usize = 16;

// A session's first state, what it starts from, and its first prompt.
const FIRST_EVENTS: u32 = 4;

impl Sessions {
    /// Creates forks of a session at the end of a turn: all of them, or none.
    ///
    /// # Errors
    /// When the turn does not exist or has no snapshot, or the request is invalid.
    pub async fn fork(
        &self,
        session: &SessionId,
        fork: ForkSession,
        user: Author,
    ) -> Result<Vec<Session>, SessionError> {
        let user = fork.author.clone().unwrap_or(user);
        let mut prompts = prompts(&fork, &user)?;
        let (source, point) = self.fork_point(session, fork.turn).await?;
        let inherited = self.secrets_for(&source, &user).await?;
        let mut warnings = Vec::new();
        if prompts.iter().any(Option::is_some) {
            let (agent, model) = (&source.session.agent, source.session.model.as_ref());
            let repositories = source.checkouts.iter().map(|one| one.repository.clone());
            let mut owners = shared_owners(repositories, &user);
            if !inherited.is_empty() {
                owners.insert(0, SecretOwner::Session(source.session.id.clone()));
            }
            self.check_model_key(agent, model, &owners).await?;
            let mask = self.secret_mask(&owners, std::iter::empty()).await?;
            let masked = |prompt: &mut Option<_>| mask_prompt(prompt.as_mut()?, &mask);
            warnings = prompts.iter_mut().map(masked).collect();
        }
        let mut warnings = warnings.into_iter();
        let fork = |prompt| {
            let (new, state, prompt, mut writes) = new_fork(&source, &point, prompt, &user, now());
            writes.extend(self.inherited_writes(&new.id, &inherited)?);
            writes.extend(warnings.next().flatten());
            Ok((new, state, prompt, writes))
        };
        let forks = prompts.into_iter().map(fork).collect::<Result<_, SessionError>>()?;
        self.insert_all(forks).await.map_err(|error| match error {
            // The snapshot was dropped after `fork_point` read it.
            SessionError::NotFound { what } if what.starts_with("snapshot") => {
                SessionError::conflict(
                    "no_snapshot",
                    format!("there is no {what}"),
                    "`harvest turns SESSION` shows the turns that can be forked",
                )
            }
            other => other,
        })
    }

    /// A session, and the point from which its forks continue at the end of a turn.
    pub(super) async fn fork_point(
        &self,
        session: &SessionId,
        turn: Option<u32>,
    ) -> Result<(SessionRecord, ForkPoint), SessionError> {
        let store = &self.shared.store;
        let source = store.session_get(session).await?;
        self.shared.check_provider(&source.session)?;
        let (turns, snapshots) =
            (store.turn_list(session).await?, store.snapshot_list(session).await?);
        if turn == Some(0) && snapshots.iter().all(|one| one.turn != Some(0)) {
            return self.repository_start(source).await;
        }
        let point = fork_point(&source.session, &turns, &snapshots, turn)?;
        Ok((source, point))
    }

    /// The start of a session that has no snapshot of it: a fresh checkout of its repositories.
    async fn repository_start(
        &self,
        source: SessionRecord,
    ) -> Result<(SessionRecord, ForkPoint), SessionError> {
        // A session that starts from a snapshot says so in its first events.
        let events = self.shared.store.event_list(&source.session.id, 0, FIRST_EVENTS).await?;
        let from_snapshot =
            |event: &Event| matches!(event.body, EventBody::Restored { snapshot_id: Some(_), .. });
        if events.iter().any(from_snapshot) {
            return Err(SessionError::conflict(
                "no_snapshot",
                "the snapshot that the session started from is no longer its own",
                "`harvest turns SESSION` shows the turns that can be restored or forked",
            ));
        }
        Ok((source, ForkPoint { snapshot: None, turn: Some(0) }))
    }
}

/// The first prompt of each fork.
fn prompts(fork: &ForkSession, user: &Author) -> Result<Vec<Option<NewPrompt>>, SessionError> {
    let invalid = |what: String| Err(SessionError::invalid("invalid_fork", what));
    let several = !fork.prompts.is_empty();
    if several && fork.prompt.is_some() {
        return invalid("give either `prompt` for all forks or `prompts`, one for each".to_owned());
    }
    let count = match fork.count {
        Some(count) => usize::try_from(count).unwrap_or(usize::MAX),
        None if several => fork.prompts.len(),
        None => 1,
    };
    if !(1..=MAX_FORKS).contains(&count) {
        return invalid(format!("`count` must be 1 to {MAX_FORKS}"));
    }
    if several && count != fork.prompts.len() {
        return invalid(format!("{} prompts for {count} forks", fork.prompts.len()));
    }
    let texts = (0..count).map(|index| fork.prompts.get(index).or(fork.prompt.as_ref()));
    Ok(texts.map(|text| text.map(|text| new_prompt(text.clone(), user.clone()))).collect())
}

/// The point from which forks continue.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ForkPoint {
    /// Absent for the start of a session from its repositories.
    pub(super) snapshot: Option<SnapshotId>,
    /// The turn that left the snapshot; 0 is the start of the session.
    turn: Option<u32>,
}

impl ForkPoint {
    fn describe(&self) -> String {
        match self.turn {
            None => "its newest snapshot".to_owned(),
            Some(0) => "its start".to_owned(),
            Some(number) => format!("turn {number}"),
        }
    }
}

fn fork_point(
    source: &Session,
    turns: &[Turn],
    snapshots: &[Snapshot],
    wanted: Option<u32>,
) -> Result<ForkPoint, SessionError> {
    let refuse = |what: String, hint| Err(SessionError::conflict("no_snapshot", what, hint));
    let exists = |id: &SnapshotId| snapshots.iter().any(|one| one.id == *id && !one.gone);
    match wanted {
        // The snapshot the session itself would continue from.
        None => match source.snapshot_id.clone().filter(exists) {
            Some(snapshot) => {
                let turn = turns.iter().find(|turn| turn.snapshot_id.as_ref() == Some(&snapshot));
                let turn = turn.map(|turn| turn.number);
                Ok(ForkPoint { snapshot: Some(snapshot), turn })
            }
            None if source.snapshot_id.is_some() => refuse(
                "the session's newest snapshot is gone".to_owned(),
                "`harvest turns SESSION` lists its turns; `harvest fork SESSION@TURN` forks one",
            ),
            None => refuse(
                "the session has no finished turn yet".to_owned(),
                "`harvest attach SESSION` follows its first turn; fork it when the turn has ended",
            ),
        },
        Some(0) => match snapshots.iter().find(|one| one.turn == Some(0) && !one.gone) {
            Some(start) => Ok(ForkPoint { snapshot: Some(start.id.clone()), turn: Some(0) }),
            None => refuse(
                "the snapshot that the session started from is gone".to_owned(),
                "`harvest turns SESSION` shows the turns that can be restored or forked",
            ),
        },
        Some(number) => {
            let turn = turns.iter().find(|turn| turn.number == number);
            let turn = turn.ok_or_else(|| SessionError::missing(format!("turn {number}")))?;
            match (&turn.snapshot_id, turn.dropped.as_deref()) {
                (Some(snapshot), _) => {
                    Ok(ForkPoint { snapshot: Some(snapshot.clone()), turn: Some(number) })
                }
                (None, Some(why)) => refuse(
                    format!("the snapshot of turn {number} was removed ({why})"),
                    "`harvest turns SESSION` shows the turns that can be restored or forked",
                ),
                (None, None) => refuse(
                    format!("turn {number} has no snapshot"),
                    "wait for the turn to end, or choose another one: `harvest turns SESSION` lists them",
                ),
            }
        }
    }
}

/// A fork's diff has the same base as its source's, unless its checkouts are fresh.
fn fork_checkout(source: &CheckoutRecord, point: &ForkPoint) -> NewCheckout {
    NewCheckout {
        repository: source.repository.clone(),
        base: source.base.clone(),
        base_commit: source.base_commit.clone().filter(|_| point.snapshot.is_some()),
    }
}

fn new_fork(
    source: &SessionRecord,
    point: &ForkPoint,
    prompt: Option<NewPrompt>,
    user: &Author,
    at: Timestamp,
) -> SessionInsert {
    let session = &source.session;
    let title = prompt.as_ref().map_or_else(|| session.title.clone(), |prompt| title(&prompt.text));
    let id = SessionId::random();
    let new = NewSession {
        branch: branch(&id, Some(&title)),
        id,
        title,
        checkouts: source.checkouts.iter().map(|one| fork_checkout(one, point)).collect(),
        agent: session.agent.clone(),
        model: session.model.clone(),
        effort: session.effort,
        network: session.network,
        provider: session.provider.clone(),
        author: user.clone(),
        conversation: source.conversation.clone(),
        forked_from: Some(session.id.clone()),
        forked_turn: point.turn,
        key: None,
        env: source.env.clone(),
        no_questions: source.no_questions,
        pr_mode: source.session.pr_mode,
        at,
    };
    let detail = format!("fork of {} at {}", session.id, point.describe());
    let body = EventBody::Restored { snapshot_id: point.snapshot.clone(), detail };
    let mut writes = vec![
        Write::Event { at, turn: None, body: Box::new(body) },
        Write::NetworkRulesOf(session.id.clone()),
    ];
    writes.extend(session.budget_micros.map(|limit| Write::Budget(Some(limit))));
    if let Some(snapshot) = point.snapshot.clone() {
        // The fork gets its own row, so that the snapshot outlives the session that took it.
        writes.push(Write::SnapshotShare { snapshot, at });
        let trees = point.turn.map(|turn| Write::TreeShare { session: session.id.clone(), turn });
        writes.extend(trees);
    }
    let state = State::new(point.snapshot.clone(), point.snapshot.is_some());
    let state = State { user: Some(user.email.clone()), ..state };
    (new, state, prompt, writes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(count: Option<u32>, prompt: Option<&str>, prompts: &[&str]) -> ForkSession {
        let prompts = prompts.iter().map(|&text| text.parse().unwrap()).collect();
        ForkSession {
            count,
            prompt: prompt.map(|text| text.parse().unwrap()),
            prompts,
            ..ForkSession::default()
        }
    }

    #[test]
    fn forks_share_one_prompt_or_get_their_own() {
        let ada = Author { name: "Ada".into(), email: "ada@example.org".into() };
        let texts = |order: ForkSession| {
            let all = prompts(&order, &ada)?;
            Ok::<_, SessionError>(
                all.into_iter().map(|one| one.map(|one| one.text)).collect::<Vec<_>>(),
            )
        };
        let some = |text: &str| Some(text.parse().unwrap());
        assert_eq!(texts(order(None, None, &[])).unwrap(), [None]);
        assert_eq!(texts(order(Some(2), Some("a"), &[])).unwrap(), [some("a"), some("a")]);
        assert_eq!(texts(order(None, None, &["a", "b"])).unwrap(), [some("a"), some("b")]);
        for wrong in [
            order(Some(0), None, &[]),
            order(Some(17), None, &[]),
            order(Some(3), None, &["a"]),
            order(None, Some("a"), &["b"]),
        ] {
            assert!(texts(wrong.clone()).is_err(), "{wrong:?}");
        }
    }
}
