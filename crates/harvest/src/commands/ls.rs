//! `harvest ls`: lists sessions, newest first.

use std::time::SystemTime;

use anyhow::{Context, Result};
use harvest_proto::{Timestamp, api::Session};

use crate::{
    Invocation,
    cli::LsArgs,
    client::{Client, query},
    render::truncate,
};

pub(crate) async fn run(ctx: &Invocation, args: LsArgs) -> Result<u8> {
    let client = Client::find(&ctx.config)?;
    let filters: Vec<(&str, String)> = [
        ("state", args.state),
        ("repository", args.repository.map(String::from)),
        ("q", args.title),
        ("key", args.key),
    ]
    .into_iter()
    .filter_map(|(name, value)| Some((name, value?)))
    .collect();
    let path = format!("/v1/sessions?limit=200&{}", query(&filters));
    let sessions: Vec<Session> = client.all(&path).await.context("cannot list sessions")?;
    if sessions.is_empty() && !ctx.print.json {
        match filters.is_empty() {
            true => {
                ctx.print.note("No sessions yet");
                ctx.print.hint("start one with `harvest run -r REPOSITORY \"PROMPT\"`");
            }
            false => ctx.print.note("No sessions match"),
        }
        return Ok(0);
    }
    let headings = ["ID", "REPOSITORY", "STATE", "TURNS", "QUEUED", "PULL REQUEST", "AGE", "TITLE"];
    ctx.print.list(&sessions, headings, row)?;
    Ok(0)
}

fn row(session: &Session) -> [String; 8] {
    let number = session.pr_number.map(|number| format!("#{number}"));
    [
        session.id.to_string(),
        repositories(session),
        state(session),
        session.turns.to_string(),
        session.queued.to_string(),
        number.unwrap_or_else(|| "–".to_owned()),
        age(session.created_at),
        truncate(&session.title, 60),
    ]
}

/// The state, with the queue position while the session waits for a slot.
fn state(session: &Session) -> String {
    match session.position {
        Some(position) => format!("{} #{position}", session.state.as_str()),
        None => session.state.as_str().to_owned(),
    }
}

/// The first repository's name and the number of others.
fn repositories(session: &Session) -> String {
    match &session.repositories[..] {
        [] => "–".to_owned(),
        [only] => only.name.to_string(),
        [first, others @ ..] => format!("{} +{}", first.name, others.len()),
    }
}

/// The time since `at`.
pub(super) fn age(at: Timestamp) -> String {
    human_age(Timestamp::from(SystemTime::now()).since(at).as_secs())
}

/// `12s`, `4m`, `3h`, `9d`.
fn human_age(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3_600 => format!("{}m", seconds / 60),
        3_600..86_400 => format!("{}h", seconds / 3_600),
        _ => format!("{}d", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn age_has_one_unit() {
        assert_eq!([0, 61, 7_200, 200_000].map(human_age), ["0s", "1m", "2h", "2d"]);
    }
}
