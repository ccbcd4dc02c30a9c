//! `harvest turns`: lists a session's turns with prompt, outcome and changes.

use anyhow::Result;
use harvest_proto::api::{DiffStat, Turn};

use crate::{
    Invocation,
    cli::SessionArg,
    printer::{count, human_millis},
    render::first_line,
};

pub(crate) async fn run(ctx: &Invocation, args: &SessionArg) -> Result<u8> {
    let (client, id) = ctx.session(&args.session).await?;
    let turns = client.turns(&id).await?;
    if turns.is_empty() && !ctx.print.json {
        ctx.print.note("No turns yet");
        return Ok(0);
    }
    let headings = ["TURN", "OUTCOME", "TOOK", "CHANGED…", "TOKENS", "SNAPSHOT", "PROMPT…"];
    ctx.print.list(&turns, headings, row)?;
    Ok(0)
}

/// How the turn ended.
pub(super) fn outcome(turn: &Turn) -> String {
    turn.outcome.map_or_else(|| "running".into(), |outcome| format!("{outcome:?}").to_lowercase())
}

/// The duration of a turn that has ended.
pub(super) fn took(turn: &Turn) -> Option<String> {
    let millis = turn.ended_at?.since(turn.started_at).as_millis();
    Some(human_millis(u64::try_from(millis).unwrap_or(u64::MAX)))
}

fn row(turn: &Turn) -> [String; 7] {
    let usage = turn.usage;
    let tokens = usage.input_tokens
        + usage.cache_read_tokens
        + usage.cache_write_tokens
        + usage.output_tokens;
    let snapshot = match (&turn.snapshot_id, &turn.dropped) {
        (Some(snapshot), _) => snapshot.to_string(),
        (None, Some(why)) => format!("– ({why})"),
        (None, None) => "–".to_owned(),
    };
    [
        match turn.after {
            Some(after) => format!("{} (after {after})", turn.number),
            None => turn.number.to_string(),
        },
        outcome(turn),
        took(turn).unwrap_or_else(|| "–".into()),
        turn.diff.map_or_else(|| "–".to_owned(), changed),
        if tokens == 0 { "–".to_owned() } else { tokens.to_string() },
        snapshot,
        first_line(&turn.text).to_owned(),
    ]
}

/// `2 files +10 −3`
fn changed(stat: DiffStat) -> String {
    match stat.files {
        0 => "nothing".to_owned(),
        files => format!("{} +{} −{}", count(files, "file"), stat.insertions, stat.deletions),
    }
}
