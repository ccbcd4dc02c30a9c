//! `harvest ls`: the sessions, newest first.

use std::time::SystemTime;

use anyhow::{Context, Result};
use harvest_proto::{Timestamp, api::Session};

use crate::{Invocation, cli::Ls, client::Client, printer::table, render::cut};

pub(crate) async fn run(here: &Invocation, args: Ls) -> Result<u8> {
    let client = Client::find(&here.config)?;
    let wanted: Vec<(&str, String)> = [
        ("state", args.state),
        ("repository", args.repository),
        ("q", args.title),
        ("key", args.key),
    ]
    .into_iter()
    .filter_map(|(name, value)| Some((name, value?)))
    .collect();
    let sessions = client.sessions_with(&wanted).await.context("cannot list sessions")?;
    if sessions.is_empty() && !here.print.json {
        match wanted.is_empty() {
            true => {
                here.print.note("no sessions yet");
                here.print.hint("start one with `harvest run -r REPOSITORY \"PROMPT\"`");
            }
            false => here.print.note("no such session"),
        }
        return Ok(0);
    }
    let now = Timestamp::from(SystemTime::now());
    here.print.result(&sessions, |sessions| {
        let rows: Vec<_> = sessions.iter().map(|session| row(session, now)).collect();
        table(&["ID", "REPOSITORY", "STATE", "TURNS", "QUEUED", "PULL", "AGE", "TITLE"], &rows)
    })?;
    Ok(0)
}

fn row(session: &Session, now: Timestamp) -> Vec<String> {
    let pull = session.pull.as_ref().map_or_else(|| "–".into(), |pull| format!("#{}", pull.number));
    vec![
        session.id.to_string(),
        repositories(session),
        state(session),
        session.turns.to_string(),
        session.queued.to_string(),
        pull,
        age(now.since(session.created_at).as_secs()),
        cut(&session.title, 60),
    ]
}

/// While it waits for a place, as which number in line.
fn state(session: &Session) -> String {
    match session.position {
        Some(position) => format!("{} #{position}", session.state.as_str()),
        None => session.state.as_str().to_owned(),
    }
}

/// The first one by name, the others as a number.
fn repositories(session: &Session) -> String {
    match session.repositories.len() {
        0 => "–".to_owned(),
        1 => session.repository.clone(),
        many => format!("{} +{}", session.repository, many - 1),
    }
}

/// `12s`, `4m`, `3h`, `9d`: nobody needs more of an age.
pub(super) fn age(seconds: u64) -> String {
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
    fn an_age_is_one_number_and_one_letter() {
        assert_eq!([0, 61, 7_200, 200_000].map(age), ["0s", "1m", "2h", "2d"]);
    }
}
