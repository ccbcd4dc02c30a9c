//! `harvest ls`: the sessions, newest first.

use std::time::SystemTime;

use anyhow::{Context, Result};
use harvest_proto::{Timestamp, api::Session};

use crate::{Invocation, client::Client, printer::table, render::cut};

pub(crate) async fn run(here: &Invocation) -> Result<u8> {
    let client = Client::find(&here.config)?;
    let sessions = client.sessions().await.context("cannot list sessions")?;
    if sessions.is_empty() && !here.print.json {
        here.print.note("no sessions yet");
        here.print.hint("start one with `harvest run -r REPOSITORY \"PROMPT\"`");
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
        session.state.as_str().into(),
        session.turns.to_string(),
        session.queued.to_string(),
        pull,
        age(now.since(session.created_at).as_secs()),
        cut(&session.title, 60),
    ]
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
