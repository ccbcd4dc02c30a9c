//! Resolves what a user types to an id: a full id, an id prefix, or `-` for the newest.

use anyhow::Result;
use harvest_proto::{
    PromptId, SandboxId, SessionId, SnapshotId,
    api::{Page, SandboxList, StoredSnapshot},
};

use crate::{backend::Backend, client::Client, printer::Advice};

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ResolveError {
    #[error("there is no {what} yet")]
    NoneExist { what: &'static str },
    #[error("no {what} matches `{typed}`")]
    NoMatch { what: &'static str, typed: String },
    #[error("`{typed}` is ambiguous: {}", .ids.join(", "))]
    Ambiguous { typed: String, ids: Vec<String> },
}

pub(crate) async fn session(client: &Client, typed: &str) -> Result<SessionId> {
    // The server checks whether a full id exists.
    if let Ok(id) = typed.parse() {
        return Ok(id);
    }
    let sessions = client.sessions().await?;
    if let Some(named) = sessions.iter().find(|session| session.key.as_deref() == Some(typed)) {
        return Ok(named.id.clone());
    }
    let ids: Vec<SessionId> = sessions.into_iter().map(|session| session.id).collect();
    let found = pick("session", SessionId::PREFIX, typed, &ids);
    found.map_err(|error| Advice::new(error.to_string(), "`harvest ls` lists sessions").into())
}

pub(crate) async fn prompt(client: &Client, session: &SessionId, typed: &str) -> Result<PromptId> {
    if let Ok(id) = typed.parse() {
        return Ok(id);
    }
    let ids: Vec<PromptId> =
        client.prompts(session).await?.into_iter().map(|prompt| prompt.id).collect();
    let found = pick("prompt", PromptId::PREFIX, typed, &ids);
    found.map_err(|error| {
        Advice::new(error.to_string(), format!("`harvest queue ls {session}` lists prompts")).into()
    })
}

pub(crate) async fn sandbox(backend: &Backend, typed: &str) -> Result<SandboxId> {
    // The backend checks whether a full id exists.
    if let Ok(id) = typed.parse() {
        return Ok(id);
    }
    sandbox_of(&backend.get("/v1/sandboxes").await?, typed)
}

/// Like [`sandbox`], from a list.
pub(crate) fn sandbox_of(list: &SandboxList, typed: &str) -> Result<SandboxId> {
    let known = list.items.iter().map(|sandbox| sandbox.id.clone());
    let ids: Vec<SandboxId> =
        known.chain(list.damaged.iter().map(|damaged| damaged.id.clone())).collect();
    let found = pick("sandbox", SandboxId::PREFIX, typed, &ids);
    found.map_err(|error| {
        Advice::new(error.to_string(), "`harvest sandbox ls` lists sandboxes").into()
    })
}

pub(crate) async fn snapshot(backend: &Backend, typed: &str) -> Result<SnapshotId> {
    if let Ok(id) = typed.parse() {
        return Ok(id);
    }
    let page: Page<StoredSnapshot> = backend.get("/v1/snapshots").await?;
    let ids: Vec<SnapshotId> = page.items.into_iter().map(|snapshot| snapshot.id).collect();
    let found = pick("snapshot", SnapshotId::PREFIX, typed, &ids);
    found.map_err(|error| {
        Advice::new(error.to_string(), "`harvest snapshot ls` lists snapshots").into()
    })
}

/// `ids` is sorted by age, newest first.
fn pick<Id: Clone + ToString>(
    what: &'static str,
    prefix: &str,
    typed: &str,
    ids: &[Id],
) -> Result<Id, ResolveError> {
    if typed == "-" {
        return ids.first().cloned().ok_or(ResolveError::NoneExist { what });
    }
    let start = match typed.strip_prefix(prefix).and_then(|rest| rest.strip_prefix('_')) {
        Some(part) => part,
        None => typed,
    };
    let prefix = format!("{prefix}_{start}");
    let matching: Vec<&Id> = ids.iter().filter(|id| id.to_string().starts_with(&prefix)).collect();
    match matching[..] {
        // An empty prefix matches everything and is ambiguous.
        [id] if !start.is_empty() => Ok(id.clone()),
        [] => Err(ResolveError::NoMatch { what, typed: typed.to_owned() }),
        _ => {
            let ids = matching.iter().take(5).map(|id| id.to_string()).collect();
            Err(ResolveError::Ambiguous { typed: typed.to_owned(), ids })
        }
    }
}

/// Splits `SESSION[@TURN]`.
pub(crate) fn at_turn(typed: &str) -> Result<(&str, Option<u32>)> {
    let Some((session, turn)) = typed.split_once('@') else { return Ok((typed, None)) };
    // `cli::arguments` turned `-@2` into `@2`.
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

    fn picked(typed: &str) -> Result<String, ResolveError> {
        pick("session", "ses", typed, &ids()).map(|id| id.to_string())
    }

    #[test]
    fn unique_prefix_resolves_with_and_without_type() {
        assert_eq!(picked("b").unwrap(), "ses_b81xaaaaaaaa");
        assert_eq!(picked("ses_4kq9").unwrap(), "ses_4kq9aaaaaaaa");
        assert_eq!(picked("-").unwrap(), "ses_4kq2aaaaaaaa");
    }

    #[test]
    fn ambiguous_or_unknown_prefix_is_refused() {
        assert!(
            matches!(picked("4kq"), Err(ResolveError::Ambiguous { ids, .. }) if ids.len() == 2)
        );
        assert!(matches!(picked("zzz"), Err(ResolveError::NoMatch { .. })));
        assert!(matches!(picked(""), Err(ResolveError::Ambiguous { .. })));
        assert!(matches!(picked("ses_"), Err(ResolveError::Ambiguous { .. })));
    }

    #[test]
    fn empty_prefix_never_resolves() {
        assert!(pick::<SessionId>("session", "ses", "-", &[]).is_err());
        assert!(pick("session", "ses", "", &ids()[..1]).is_err());
    }

    #[test]
    fn turn_follows_at_sign() {
        assert_eq!(at_turn("b81@2").unwrap(), ("b81", Some(2)));
        assert_eq!(at_turn("b81").unwrap(), ("b81", None));
        assert_eq!(at_turn("@2").unwrap(), ("-", Some(2)));
        assert!(at_turn("b81@last").is_err());
    }
}
