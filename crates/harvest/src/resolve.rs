//! Finds the one thing a person means by a few letters: an id, the beginning of one, `-` for the newest.

use anyhow::Result;
use harvest_proto::{
    PromptId, SandboxId, SessionId, SnapshotId,
    api::{
        Page,
        machines::{MachineSnapshot, SandboxList},
    },
};

use crate::{client::Client, desk::Desk, printer::Advice};

/// Why letters name nothing, or too much.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Unclear {
    #[error("there is no {what} yet")]
    Nothing { what: &'static str },
    #[error("no {what} begins with `{typed}`")]
    None { what: &'static str, typed: String },
    #[error("`{typed}` could be any of {}", .ids.join(", "))]
    Many { typed: String, ids: Vec<String> },
}

/// The session a person means.
pub(crate) async fn session(client: &Client, typed: &str) -> Result<SessionId> {
    // A whole id needs no list; the server says whether it exists.
    if let Ok(id) = typed.parse() {
        return Ok(id);
    }
    let sessions = client.sessions().await?;
    // A key is a whole name, chosen by somebody.
    if let Some(named) = sessions.iter().find(|session| session.key.as_deref() == Some(typed)) {
        return Ok(named.id.clone());
    }
    let ids: Vec<SessionId> = sessions.into_iter().map(|session| session.id).collect();
    let found = pick("session", SessionId::PREFIX, typed, &ids);
    found.map_err(|error| Advice::new(error.to_string(), "see `harvest ls`").into())
}

/// The prompt of a session a person means.
pub(crate) async fn prompt(client: &Client, session: &SessionId, typed: &str) -> Result<PromptId> {
    if let Ok(id) = typed.parse() {
        return Ok(id);
    }
    let ids: Vec<PromptId> =
        client.prompts(session).await?.into_iter().map(|prompt| prompt.id).collect();
    let found = pick("prompt", PromptId::PREFIX, typed, &ids);
    found.map_err(|error| {
        Advice::new(error.to_string(), format!("see `harvest queue ls {session}`")).into()
    })
}

/// The sandbox a person means.
pub(crate) async fn sandbox(desk: &Desk, typed: &str) -> Result<SandboxId> {
    // A whole id needs no list; who is asked says whether it exists.
    if let Ok(id) = typed.parse() {
        return Ok(id);
    }
    sandbox_of(&desk.get("/v1/sandboxes").await?, typed)
}

/// The one of these a person means.
pub(crate) fn sandbox_of(list: &SandboxList, typed: &str) -> Result<SandboxId> {
    let known = list.items.iter().map(|sandbox| sandbox.id.clone());
    let ids: Vec<SandboxId> = known.chain(list.torn.iter().map(|torn| torn.id.clone())).collect();
    let found = pick("sandbox", SandboxId::PREFIX, typed, &ids);
    found.map_err(|error| Advice::new(error.to_string(), "see `harvest sandbox ls`").into())
}

/// The snapshot a person means.
pub(crate) async fn snapshot(desk: &Desk, typed: &str) -> Result<SnapshotId> {
    if let Ok(id) = typed.parse() {
        return Ok(id);
    }
    let page: Page<MachineSnapshot> = desk.get("/v1/snapshots").await?;
    let ids: Vec<SnapshotId> = page.items.into_iter().map(|snapshot| snapshot.id).collect();
    let found = pick("snapshot", SnapshotId::PREFIX, typed, &ids);
    found.map_err(|error| Advice::new(error.to_string(), "see `harvest snapshot ls`").into())
}

/// `ids` has the newest first.
fn pick<Id: Clone + ToString>(
    what: &'static str,
    prefix: &str,
    typed: &str,
    ids: &[Id],
) -> Result<Id, Unclear> {
    if typed == "-" {
        return ids.first().cloned().ok_or(Unclear::Nothing { what });
    }
    let start = match typed.strip_prefix(prefix).and_then(|rest| rest.strip_prefix('_')) {
        Some(part) => part,
        None => typed,
    };
    let full = format!("{prefix}_{start}");
    let matching: Vec<&Id> = ids.iter().filter(|id| id.to_string().starts_with(&full)).collect();
    match matching[..] {
        // An empty text would mean any of them.
        [id] if !start.is_empty() => Ok(id.clone()),
        [] => Err(Unclear::None { what, typed: typed.to_owned() }),
        _ => {
            let ids = matching.iter().take(5).map(|id| id.to_string()).collect();
            Err(Unclear::Many { typed: typed.to_owned(), ids })
        }
    }
}

/// `SESSION@TURN`, the turn being optional.
pub(crate) fn at_turn(typed: &str) -> Result<(&str, Option<u32>)> {
    let Some((session, turn)) = typed.split_once('@') else { return Ok((typed, None)) };
    // `-@2` reaches us as `@2`: see `cli::arguments`.
    let session = if session.is_empty() { "-" } else { session };
    let turn = turn.trim_start_matches("turn").parse().map_err(|_| {
        Advice::new(
            format!("`{turn}` is not a turn"),
            "write it as `SESSION@2`; turns count from 1",
        )
    })?;
    Ok((session, Some(turn)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids() -> Vec<SessionId> {
        ["ses_4kq2aaaaaaaa", "ses_4kq9aaaaaaaa", "ses_b81xaaaaaaaa"]
            .map(|id| id.parse().unwrap())
            .into()
    }

    fn picked(typed: &str) -> Result<String, Unclear> {
        pick("session", "ses", typed, &ids()).map(|id| id.to_string())
    }

    #[test]
    fn a_unique_beginning_names_it_with_or_without_the_prefix() {
        assert_eq!(picked("b").unwrap(), "ses_b81xaaaaaaaa");
        assert_eq!(picked("ses_4kq9").unwrap(), "ses_4kq9aaaaaaaa");
        assert_eq!(picked("-").unwrap(), "ses_4kq2aaaaaaaa");
    }

    #[test]
    fn an_unclear_beginning_names_nothing() {
        assert!(matches!(picked("4kq"), Err(Unclear::Many { ids, .. }) if ids.len() == 2));
        assert!(matches!(picked("zzz"), Err(Unclear::None { .. })));
        assert!(matches!(picked(""), Err(Unclear::Many { .. })));
        assert!(matches!(picked("ses_"), Err(Unclear::Many { .. })));
    }

    #[test]
    fn an_empty_or_lone_list_is_not_guessed_from_nothing() {
        assert!(pick::<SessionId>("session", "ses", "-", &[]).is_err());
        assert!(pick("session", "ses", "", &ids()[..1]).is_err());
    }

    #[test]
    fn a_turn_follows_an_at_sign() {
        assert_eq!(at_turn("b81@2").unwrap(), ("b81", Some(2)));
        assert_eq!(at_turn("b81").unwrap(), ("b81", None));
        assert_eq!(at_turn("@2").unwrap(), ("-", Some(2)));
        assert!(at_turn("b81@last").is_err());
    }
}
