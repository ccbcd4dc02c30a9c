//! `harvest turns`: what was asked of a session, how each turn ended and what it changed.

use anyhow::Result;
use harvest_proto::api::{DiffStat, Turn};

use crate::{
    Invocation,
    cli::One,
    client::Client,
    printer::{table, took},
    render::{cut, first_line},
    resolve,
};

pub(crate) async fn run(here: &Invocation, args: &One) -> Result<u8> {
    let client = Client::find(&here.config)?;
    let id = resolve::session(&client, &args.session).await?;
    let turns = client.turns(&id).await?;
    if turns.is_empty() && !here.print.json {
        here.print.note("no turns yet");
        return Ok(0);
    }
    here.print.result(&turns, |turns| {
        let rows: Vec<_> = turns.iter().map(row).collect();
        table(&["TURN", "OUTCOME", "TOOK", "CHANGED", "TOKENS", "SNAPSHOT", "PROMPT"], &rows)
    })?;
    Ok(0)
}

fn row(turn: &Turn) -> Vec<String> {
    let millis = turn.ended_at.map(|ended| ended.since(turn.started_at).as_millis());
    let took =
        millis.map_or_else(|| "–".into(), |millis| took(u64::try_from(millis).unwrap_or(u64::MAX)));
    let usage = turn.usage;
    let tokens = usage.input_tokens
        + usage.cache_read_tokens
        + usage.cache_write_tokens
        + usage.output_tokens;
    let snapshot = match (&turn.snapshot, &turn.dropped) {
        (Some(snapshot), _) => snapshot.to_string(),
        (None, Some(why)) => format!("– ({why})"),
        (None, None) => "–".to_owned(),
    };
    vec![
        match turn.after {
            Some(after) => format!("{} (after {after})", turn.number),
            None => turn.number.to_string(),
        },
        turn.outcome
            .map_or_else(|| "running".into(), |outcome| format!("{outcome:?}").to_lowercase()),
        took,
        turn.diff.map_or_else(|| "–".to_owned(), changed),
        if tokens == 0 { "–".to_owned() } else { tokens.to_string() },
        snapshot,
        cut(first_line(&turn.text), 60),
    ]
}

/// `2 files +10 −3`
fn changed(stat: DiffStat) -> String {
    match stat.files {
        0 => "nothing".to_owned(),
        1 => format!("1 file +{} −{}", stat.insertions, stat.deletions),
        files => format!("{files} files +{} −{}", stat.insertions, stat.deletions),
    }
}
