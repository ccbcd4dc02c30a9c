//! Forks: sessions that go on from where another one was, files and conversation together, each on a
//! branch of its own. All that are asked for at once are made, or none.

use harvest_proto::{
    EventBody, SessionId, SnapshotId, Timestamp,
    api::{ForkSession, Session, Snapshot, Turn},
    bridge::Author,
};
use harvest_store::{CheckoutRecord, NewCheckout, NewPrompt, NewSession, SessionRecord, Write};

use crate::{
    Sessions,
    asks::{new_prompt, title},
    decide::State,
    error::SessionError,
    sessions::{Birth, branch},
    wiring::now,
};

/// As many as one machine can be expected to start at once.
pub const MOST_FORKS: usize = 16;

impl Sessions {
    /// Creates sessions that go on from the end of a turn of another: all of them, or none.
    ///
    /// # Errors
    /// When the turn is not known or left no snapshot, or the request makes no sense.
    pub async fn fork(
        &self,
        session: &SessionId,
        fork: ForkSession,
        user: Author,
    ) -> Result<Vec<Session>, SessionError> {
        let prompts = prompts(&fork, &user)?;
        let source = self.shared.store.session_get(session).await?;
        let turns = self.shared.store.turn_list(session).await?;
        let snapshots = self.shared.store.snapshot_list(session).await?;
        let point = fork_point(&source.session, &turns, &snapshots, fork.turn)?;
        let births = prompts.into_iter().map(|prompt| birth(&source, &point, prompt, &user, now()));
        self.insert_all(births.collect()).await.map_err(|error| match error {
            // It was dropped after we had looked.
            SessionError::NotFound { what } if what.starts_with("snapshot") => {
                SessionError::conflict(
                    "no_snapshot",
                    format!("there is no {what}"),
                    "see `harvest turns` for those that can be forked",
                )
            }
            other => other,
        })
    }
}

/// The first prompt of each fork.
fn prompts(fork: &ForkSession, user: &Author) -> Result<Vec<Option<NewPrompt>>, SessionError> {
    let invalid = |what: String| Err(SessionError::invalid("invalid_fork", what));
    let several = !fork.prompts.is_empty();
    if several && fork.prompt.is_some() {
        return invalid("a fork has `prompt` for all or `prompts`, one for each".to_owned());
    }
    let count = match fork.count {
        Some(count) => usize::try_from(count).unwrap_or(usize::MAX),
        None if several => fork.prompts.len(),
        None => 1,
    };
    if !(1..=MOST_FORKS).contains(&count) {
        return invalid(format!("1 to {MOST_FORKS} forks are made at once"));
    }
    if several && count != fork.prompts.len() {
        return invalid(format!("there are {} prompts for {count} forks", fork.prompts.len()));
    }
    let texts = (0..count).map(|index| fork.prompts.get(index).or(fork.prompt.as_ref()));
    texts.map(|text| text.map(|text| new_prompt(text.clone(), user.clone())).transpose()).collect()
}

/// What forks begin with.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Point {
    pub(crate) snapshot: SnapshotId,
    /// The turn that left it, or 0 for the beginning.
    turn: Option<u32>,
}

impl Point {
    /// Where in the session that was.
    pub(crate) fn words(&self) -> String {
        match self.turn {
            None => "its newest snapshot".to_owned(),
            Some(0) => "its beginning".to_owned(),
            Some(number) => words(number),
        }
    }
}

pub(crate) fn fork_point(
    source: &Session,
    turns: &[Turn],
    snapshots: &[Snapshot],
    wanted: Option<u32>,
) -> Result<Point, SessionError> {
    let refuse = |what: String, hint| Err(SessionError::conflict("no_snapshot", what, hint));
    let kept = |id: &SnapshotId| snapshots.iter().any(|one| one.id == *id && !one.gone);
    match wanted {
        // What the session goes on from itself: the end of its newest turn, a pause, or where it was put back.
        None => match source.snapshot.clone().filter(kept) {
            Some(snapshot) => {
                let turn = turns.iter().find(|turn| turn.snapshot.as_ref() == Some(&snapshot));
                let turn = turn.map(|turn| turn.number);
                Ok(Point { snapshot, turn })
            }
            None if source.snapshot.is_some() => {
                refuse("the session's newest snapshot is gone".to_owned(), "fork one of its turns")
            }
            None => refuse(
                "the session has ended no turn yet".to_owned(),
                "wait for its first turn to end",
            ),
        },
        Some(0) => match snapshots.iter().find(|one| one.turn == Some(0) && !one.gone) {
            Some(began) => Ok(Point { snapshot: began.id.clone(), turn: Some(0) }),
            None => refuse(
                "the session began from its repository, not from a snapshot".to_owned(),
                "start another on the same repository with `harvest run`",
            ),
        },
        Some(number) => {
            let turn = turns.iter().find(|turn| turn.number == number);
            let turn = turn.ok_or_else(|| SessionError::missing(words(number)))?;
            match (&turn.snapshot, turn.dropped.as_deref()) {
                (Some(snapshot), _) => Ok(Point { snapshot: snapshot.clone(), turn: Some(number) }),
                (None, Some(why)) => refuse(
                    format!("turn {number} has no snapshot any more ({why})"),
                    "fork another turn; `harvest turns` shows which can be",
                ),
                (None, None) => refuse(
                    format!("turn {number} left no snapshot"),
                    "wait for the turn to end, or fork from another",
                ),
            }
        }
    }
}

fn words(turn: u32) -> String {
    format!("turn {turn}")
}

/// A fork's work is compared with what its source's is compared with.
fn same_start(source: &CheckoutRecord) -> NewCheckout {
    NewCheckout {
        repository: source.repository.clone(),
        base: source.base.clone(),
        base_commit: source.base_commit.clone(),
    }
}

fn birth(
    source: &SessionRecord,
    point: &Point,
    prompt: Option<NewPrompt>,
    user: &Author,
    at: Timestamp,
) -> Birth {
    let session = &source.session;
    let title = prompt.as_ref().map_or_else(|| session.title.clone(), |prompt| title(&prompt.text));
    let id = SessionId::random();
    let new = NewSession {
        branch: branch(&id, Some(&title)),
        id,
        title,
        checkouts: source.checkouts.iter().map(same_start).collect(),
        agent: session.agent.clone(),
        model: session.model.clone(),
        network: session.network.clone(),
        author: user.clone(),
        conversation: source.conversation.clone(),
        forked_from: Some(session.id.clone()),
        forked_turn: point.turn,
        key: None,
        env: source.env.clone(),
        at,
    };
    let detail = format!("fork of {} at {}", session.id, point.words());
    let body = EventBody::Restored { snapshot: point.snapshot.clone(), detail };
    let mut writes = vec![
        Write::Event { at, turn: None, body: Box::new(body) },
        // A row of its own, so that the snapshot outlives the session that took it.
        Write::SnapshotShare { snapshot: point.snapshot.clone(), at },
    ];
    writes.extend(point.turn.map(|turn| Write::TreeShare { session: session.id.clone(), turn }));
    let state =
        State { user: Some(user.email.clone()), ..State::new(Some(point.snapshot.clone()), true) };
    (new, state, prompt, writes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(count: Option<u32>, prompt: Option<&str>, prompts: &[&str]) -> ForkSession {
        let prompts = prompts.iter().map(|&text| text.to_owned()).collect();
        ForkSession { turn: None, count, prompt: prompt.map(str::to_owned), prompts }
    }

    #[test]
    fn each_fork_gets_the_prompt_or_one_of_the_prompts() {
        let ada = Author { name: "Ada".into(), email: "ada@example.org".into() };
        let texts = |order: ForkSession| {
            let all = prompts(&order, &ada)?;
            Ok::<_, SessionError>(
                all.into_iter().map(|one| one.map(|one| one.text)).collect::<Vec<_>>(),
            )
        };
        let some = |text: &str| Some(text.to_owned());
        assert_eq!(texts(order(None, None, &[])).unwrap(), [None]);
        assert_eq!(texts(order(Some(2), Some("a"), &[])).unwrap(), [some("a"), some("a")]);
        assert_eq!(texts(order(None, None, &["a", "b"])).unwrap(), [some("a"), some("b")]);
        for wrong in [
            order(Some(0), None, &[]),
            order(Some(17), None, &[]),
            order(Some(3), None, &["a"]),
            order(None, Some("a"), &["b"]),
            order(None, None, &["a", " "]),
        ] {
            assert!(texts(wrong.clone()).is_err(), "{wrong:?}");
        }
    }
}
