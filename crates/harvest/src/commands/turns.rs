//! `harvest turns`: lists a session's turns with prompt, outcome and changes.

use anyhow::Result;
use harvest_proto::api::{DiffStat, Turn};

use crate::{
    Invocation,
    cli::SessionArg,
    client::Client,
    printer::{count, human_millis, table},
    render::{first_line, truncate},
    resolve,
};

pub(crate) async fn run(ctx: &Invocation, args: &SessionArg) -> Result<u8> {
    let client = Client::find(&ctx.config)?;
    let id = resolve::session(&client, &args.session).await?;
    let turns = client.turns(&id).await?;
    if turns.is_empty() && !ctx.print.json {
        ctx.print.note("No turns yet");
        return Ok(0);
    }
    ctx.print.result(&turns, |turns| {
        let rows: Vec<_> = turns.iter().map(row).collect();
        table(&["TURN", "OUTCOME", "TOOK", "CHANGED", "TOKENS", "SNAPSHOT", "PROMPT"], &rows)
    })?;
    Ok(0)
}

fn row(turn: &Turn) -> Vec<String> {
    let millis = turn.ended_at.map(|ended| ended.since(turn.started_at).as_millis());
    let took = millis.map_or_else(
        || "–".into(),
        |millis| human_millis(u64::try_from(millis).unwrap_or(u64::MAX)),
    );
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
        truncate(first_line(&turn.text), 60),
    ]
}

/// `2 files +10 −3`
fn changed(stat: DiffStat) -> String {
    match stat.files {
        0 => "nothing".to_owned(),
        files => format!("{} +{} −{}", count(files, "file"), stat.insertions, stat.deletions),
    }
}
