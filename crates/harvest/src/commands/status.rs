//! `harvest` without a verb: prints the status in one line and the next useful command.

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
    let (sessions, repositories) = (client.sessions().await?, client.repositories().await?);
    let document = json!({
        "version": version,
        "server": client.url(),
        "repositories": repositories.len(),
        "sessions": counts(&sessions).into_iter().map(|(state, count)| (state.to_owned(), count.into()))
            .collect::<serde_json::Map<_, _>>(),
    });
    ctx.print.result(&document, |_| {
        format!("Harvest {version} at {}: {}\n", client.url(), summary(&sessions, &repositories))
    })?;
    ctx.print.hint(next(&sessions, &repositories));
    Ok(0)
}

/// The number of sessions in each state, in lifecycle order.
fn counts(sessions: &[Session]) -> Vec<(&'static str, usize)> {
    use SessionState::{Archived, Failed, Idle, NeedsInput, Paused, Queued, Running, Starting};
    let count =
        |state: SessionState| sessions.iter().filter(|session| session.state == state).count();
    let all = [Queued, Starting, Running, NeedsInput, Idle, Paused, Failed, Archived];
    all.into_iter()
        .map(|state| (state.as_str(), count(state)))
        .filter(|(_, count)| *count > 0)
        .collect()
}

fn summary(sessions: &[Session], repositories: &[Repository]) -> String {
    let many = |count: usize, one: &str, more: &str| match count {
        0 => format!("no {more}"),
        1 => format!("1 {one}"),
        _ => format!("{count} {more}"),
    };
    let states: Vec<String> =
        counts(sessions).into_iter().map(|(state, count)| format!("{count} {state}")).collect();
    let states =
        if states.is_empty() { String::new() } else { format!(" ({})", states.join(", ")) };
    let repositories = many(repositories.len(), "repository", "repositories");
    format!("{repositories}, {}{states}", many(sessions.len(), "session", "sessions"))
}

/// The next useful command.
fn next(sessions: &[Session], repositories: &[Repository]) -> String {
    let newest =
        |states: &[SessionState]| sessions.iter().find(|session| states.contains(&session.state));
    if let Some(session) = newest(&[SessionState::NeedsInput]) {
        return format!("{0} asks a question: `harvest attach {0}` shows it", session.id);
    }
    if let Some(session) =
        newest(&[SessionState::Running, SessionState::Starting, SessionState::Queued])
    {
        return format!("`harvest attach {}` follows the running session", session.id);
    }
    match (repositories, sessions) {
        ([], _) => "`harvest repo add URL|FOLDER` registers a repository".into(),
        ([first, ..], []) => format!("`harvest run -r {} \"PROMPT\"` starts a session", first.name),
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
            "author": { "name": "You", "email": "you@localhost" }, "sandbox": null, "epoch": 0,
            "snapshot_id": null, "forked_from": null, "turns": 0, "queued": 0,
            "usage": { "input_tokens": 0, "output_tokens": 0, "cache_read_tokens": 0, "cache_write_tokens": 0 },
            "repositories": [], "env": [], "seq": 1, "created_at": "1970-01-01T00:00:00.000Z",
            "last_activity": "1970-01-01T00:00:00.000Z",
        });
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn status_counts_states_and_hints_most_urgent() {
        let sessions = [session("running"), session("needs_input"), session("running")];
        assert_eq!(
            summary(&sessions, &[]),
            "no repositories, 3 sessions (2 running, 1 needs_input)"
        );
        assert!(next(&sessions, &[]).contains("asks a question"));
        assert!(next(&sessions[..1], &[]).starts_with("`harvest attach ses_4kq2aaaaaaaa`"));
        assert_eq!(summary(&[], &[]), "no repositories, no sessions");
        assert!(next(&[], &[]).contains("repo add"));
    }
}
