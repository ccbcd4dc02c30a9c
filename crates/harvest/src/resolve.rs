//! Resolves what a user types to an id: a full id, an id prefix, or `-` for the newest.

use anyhow::{Result, bail};
use harvest_proto::{
    PromptId, SandboxId, SessionId, SnapshotId,
    api::{Page, SandboxList, StoredSnapshot},
};

use crate::{
    backend::Backend,
    cli::NEWEST_SESSION,
    client::{Client, query},
    printer::Advice,
};

pub(crate) async fn session(client: &Client, typed: &str) -> Result<SessionId> {
    // The server checks whether a full id exists.
    if let Ok(id) = typed.parse() {
        return Ok(id);
    }
    let filter = match typed {
        "-" => String::new(),
        _ => {
            let named = client.sessions(&query(&[("key", typed)]), 1).await?.0;
            if let Some(named) = named.into_iter().next() {
                return Ok(named.id);
            }
            let part = typed.strip_prefix("ses_").unwrap_or(typed);
            query(&[("id", format!("ses_{part}"))])
        }
    };
    // More than one id is ambiguous; the error names a few.
    let ids = client.sessions(&filter, 5).await?.0.into_iter().map(|session| session.id);
    let picked = pick("session", SessionId::PREFIX, typed, ids);
    advise(picked, "`harvest ls` lists sessions")
}

pub(crate) async fn prompt(client: &Client, session: &SessionId, typed: &str) -> Result<PromptId> {
    if let Ok(id) = typed.parse() {
        return Ok(id);
    }
    let ids = client.prompts(session).await?.into_iter().map(|prompt| prompt.id);
    let picked = pick("prompt", PromptId::PREFIX, typed, ids);
    advise(picked, &format!("`harvest queue ls {session}` lists prompts"))
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
    let ids = known.chain(list.damaged.iter().map(|damaged| damaged.id.clone()));
    let picked = pick("sandbox", SandboxId::PREFIX, typed, ids);
    advise(picked, "`harvest sandbox ls` lists sandboxes")
}

pub(crate) async fn snapshot(backend: &Backend, typed: &str) -> Result<SnapshotId> {
    if let Ok(id) = typed.parse() {
        return Ok(id);
    }
    let page: Page<StoredSnapshot> = backend.get("/v1/snapshots").await?;
    let ids = page.items.into_iter().map(|snapshot| snapshot.id);
    let picked = pick("snapshot", SnapshotId::PREFIX, typed, ids);
    advise(picked, "`harvest snapshot ls` lists snapshots")
}

fn advise<Id>(picked: Result<Id, String>, hint: &str) -> Result<Id> {
    picked.map_err(|message| Advice::new(message, hint).into())
}

/// `ids` is sorted by age, newest first. The error is the message.
fn pick<Id: Clone + ToString>(
    what: &str,
    prefix: &str,
    typed: &str,
    mut ids: impl Iterator<Item = Id>,
) -> Result<Id, String> {
    if typed == "-" {
        return ids.next().ok_or_else(|| format!("there is no {what} yet"));
    }
    if typed.is_empty() {
        // In a script, `"$session"` is empty when the variable is not set.
        return Err(format!("the name of the {what} is empty"));
    }
    let part = typed.strip_prefix(prefix).and_then(|rest| rest.strip_prefix('_'));
    let start = part.unwrap_or(typed);
    let prefix = format!("{prefix}_{start}");
    let matching: Vec<Id> = ids.filter(|id| id.to_string().starts_with(&prefix)).collect();
    match &matching[..] {
        // An empty prefix matches everything and is ambiguous.
        [id] if !start.is_empty() => Ok(id.clone()),
        [] => Err(format!("no {what} matches `{typed}`")),
        _ => {
            let ids: Vec<String> = matching.iter().take(5).map(Id::to_string).collect();
            Err(format!("`{typed}` is ambiguous: {}", ids.join(", ")))
        }
    }
}

/// Splits `SESSION[@TURN]`.
pub(crate) fn at_turn(typed: &str) -> Result<(&str, Option<u32>)> {
    let Some((session, turn)) = typed.split_once('@') else { return Ok((typed, None)) };
    if session.is_empty() {
        // In a script, `$session@2` is `@2` when the variable is not set.
        let hint = format!("write it as `SESSION@{turn}`, or `-@{turn}` for the newest session");
        bail!(Advice::usage(format!("`@{turn}` names no session"), hint));
    }
    let session = if session == NEWEST_SESSION { "-" } else { session };
    let turn = turn.trim_start_matches("turn").parse().map_err(|_| {
        Advice::new(
            format!("`{turn}` is not a turn"),
            "write it as `SESSION@2`; turns count from 1, and 0 is the start",
        )
    })?;
    Ok((session, Some(turn)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids() -> impl Iterator<Item = SessionId> {
        ["ses_4kq2aaaaaaaa", "ses_4kq9aaaaaaaa", "ses_b81xaaaaaaaa"]
            .map(|id| id.parse().unwrap())
            .into_iter()
    }

    fn picked(typed: &str) -> Result<String, String> {
        pick("session", "ses", typed, ids()).map(|id| id.to_string())
    }

    #[test]
    fn unique_prefix_resolves_with_and_without_type() {
        assert_eq!(picked("b").unwrap(), "ses_b81xaaaaaaaa");
        assert_eq!(picked("ses_4kq9").unwrap(), "ses_4kq9aaaaaaaa");
        assert_eq!(picked("-").unwrap(), "ses_4kq2aaaaaaaa");
    }

    #[test]
    fn ambiguous_or_unknown_prefix_is_refused() {
        let ambiguous = "`4kq` is ambiguous: ses_4kq2aaaaaaaa, ses_4kq9aaaaaaaa";
        assert_eq!(picked("4kq").unwrap_err(), ambiguous);
        assert_eq!(picked("zzz").unwrap_err(), "no session matches `zzz`");
        assert!(picked("ses_").unwrap_err().contains("is ambiguous"));
        assert_eq!(picked("").unwrap_err(), "the name of the session is empty");
    }

    #[test]
    fn empty_prefix_never_resolves() {
        assert!(pick::<SessionId>("session", "ses", "-", std::iter::empty()).is_err());
        assert!(pick("session", "ses", "", ids().take(1)).is_err());
    }

    #[test]
    fn turn_follows_at_sign() {
        assert_eq!(at_turn("b81@2").unwrap(), ("b81", Some(2)));
        assert_eq!(at_turn("b81").unwrap(), ("b81", None));
        assert_eq!(at_turn("ses_-@2").unwrap(), ("-", Some(2)));
        assert!(at_turn("@2").is_err(), "an unset variable is not the newest session");
        assert!(at_turn("b81@last").is_err());
    }
}
