//! `harvest` without a verb: prints the status in one line and the next useful command.

use std::collections::BTreeMap;

use anyhow::Result;
use harvest_proto::api::{Repository, Session, SessionState};
use serde_json::json;

use crate::{
    Invocation,
    client::{self, Client},
};

pub(crate) async fn run(ctx: &Invocation) -> Result<u8> {
    let version = env!("CARGO_PKG_VERSION");
    if ctx.config.url.is_none() && client::local(&ctx.config).is_err() {
        let document = json!({ "version": version, "server": null });
        ctx.print.result(&document, |_| format!("Harvest {version}: no server is running\n"))?;
        ctx.print.hint(match ctx.config.home.join("harvest.db").exists() {
            true => "`harvest up` starts one",
            false => "`harvest quickstart` runs a demo, `harvest up` starts a server",
        });
        return Ok(0);
    }
    let client = Client::find(&ctx.config)?;
    let (counts, repositories) = (client.session_counts().await?, client.repositories().await?);
    let warm = client.pool().await?.len() as u64;
    let urgent = most_urgent(&client, &counts).await?;
    let document = json!({
        "version": version,
        "server": client.url(),
        "repositories": repositories.len(),
        "sessions": counts,
        "warm_sandboxes": warm,
    });
    ctx.print.result(&document, |_| {
        format!(
            "Harvest {version} at {}: {}\n",
            client.url(),
            summary(&counts, &repositories, warm)
        )
    })?;
    ctx.print.hint(next(urgent.as_ref(), !counts.is_empty(), &repositories));
    Ok(0)
}

/// The newest session that waits for the user, else one that works.
async fn most_urgent(client: &Client, counts: &Counts) -> Result<Option<Session>> {
    use SessionState::{NeedsInput, Queued, Running, Starting};
    let states = [NeedsInput, Running, Starting, Queued].map(SessionState::as_str);
    let Some(state) = states.into_iter().find(|state| counts.contains_key(*state)) else {
        return Ok(None);
    };
    Ok(client.sessions(&format!("state={state}"), 1).await?.0.pop())
}

/// The number of sessions in each state.
type Counts = BTreeMap<String, u64>;

fn summary(counts: &Counts, repositories: &[Repository], warm: u64) -> String {
    let many = |count: u64, one: &str, more: &str| match count {
        0 => format!("no {more}"),
        1 => format!("1 {one}"),
        _ => format!("{count} {more}"),
    };
    let count = |state: SessionState| {
        counts.get(state.as_str()).map(|count| format!("{count} {}", state.as_str()))
    };
    let states: Vec<String> = SessionState::ALL.into_iter().filter_map(count).collect();
    let states =
        if states.is_empty() { String::new() } else { format!(" ({})", states.join(", ")) };
    let repositories = many(repositories.len() as u64, "repository", "repositories");
    let sessions = many(counts.values().sum(), "session", "sessions");
    let warm = match warm {
        0 => String::new(),
        _ => format!(", {} waiting for a session", many(warm, "sandbox", "sandboxes")),
    };
    format!("{repositories}, {sessions}{states}{warm}")
}

/// The next useful command.
fn next(urgent: Option<&Session>, has_sessions: bool, repositories: &[Repository]) -> String {
    match (urgent, repositories) {
        (Some(session), _) if session.state == SessionState::NeedsInput => {
            format!("{0} asks a question: `harvest attach {0}` shows it", session.id)
        }
        (Some(session), _) => {
            format!("`harvest attach {}` follows the running session", session.id)
        }
        (None, []) => "`harvest repo add URL|FOLDER` registers a repository".into(),
        (None, [first, ..]) if !has_sessions => {
            format!("`harvest run -r {} \"PROMPT\"` starts a session", first.name)
        }
        _ => "`harvest ls` lists sessions, `harvest send - \"PROMPT\"` continues the newest".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn session(state: &str) -> Session {
        let value = json!({
            "id": "ses_4kq2aaaaaaaa", "title": "t", "state": state, "reason": "ready", "repository": "local/calc",
            "branch": "b", "agent": "claude", "model": null, "network": "none", "provider": "local",
            "author": { "name": "Ada", "email": "ada@example.org" }, "sandbox": null, "epoch": 0,
            "snapshot_id": null, "forked_from": null, "turns": 0, "queued": 0,
            "usage": { "input_tokens": 0, "output_tokens": 0, "cache_read_tokens": 0, "cache_write_tokens": 0 },
            "spent_micros": 0,
            "repositories": [], "env": [], "seq": 1, "created_at": "1970-01-01T00:00:00.000Z",
            "last_activity": "1970-01-01T00:00:00.000Z",
        });
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn status_counts_states_and_hints_most_urgent() {
        let counts = Counts::from([("needs_input".into(), 1), ("running".into(), 2)]);
        assert_eq!(
            summary(&counts, &[], 0),
            "no repositories, 3 sessions (2 running, 1 needs_input)"
        );
        assert!(next(Some(&session("needs_input")), true, &[]).contains("asks a question"));
        let running = next(Some(&session("running")), true, &[]);
        assert!(running.starts_with("`harvest attach ses_4kq2aaaaaaaa`"));
        let summary = |warm| summary(&Counts::new(), &[], warm);
        assert_eq!(summary(0), "no repositories, no sessions");
        let waiting = "no repositories, no sessions, 1 sandbox waiting for a session";
        assert_eq!(summary(1), waiting);
        assert!(next(None, false, &[]).contains("repo add"));
    }
}
