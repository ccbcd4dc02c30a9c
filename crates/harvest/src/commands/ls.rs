//! `harvest ls`: lists sessions, newest first.

use std::time::SystemTime;

use anyhow::{Context, Result};
use harvest_proto::{Timestamp, api::Session};

use crate::{
    Invocation,
    cli::LsArgs,
    client::{Client, query},
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
    // A state or a key is asked for, archived or not.
    let hides_archived =
        !args.all && !filters.iter().any(|(name, _)| ["state", "key"].contains(name));
    let archived = hides_archived.then(|| ("archived", "false".to_owned()));
    let search: Vec<_> = filters.iter().cloned().chain(archived).collect();
    let max = if args.all { usize::MAX } else { args.number as usize };
    let (sessions, more) =
        client.sessions(&query(&search), max).await.context("cannot list sessions")?;
    if ctx.print.json {
        return ctx.print.document(&sessions).map(|()| 0);
    }
    let counts = client.session_counts().await?;
    let hidden = if hides_archived { counts.get("archived").copied().unwrap_or(0) } else { 0 };
    if sessions.is_empty() && filters.is_empty() && hidden == 0 {
        ctx.print.note("No sessions yet");
        ctx.print.hint("start one with `harvest run -r REPOSITORY \"PROMPT\"`");
        return Ok(0);
    }
    match sessions.is_empty() {
        true => ctx.print.note("No sessions match"),
        false => {
            let headings = ["ID", "STATE", "AGE", "TURNS", "PR", "REPOSITORY…", "TITLE…"];
            ctx.print.list(&sessions, headings, row)?;
        }
    }
    let total = counts.values().sum::<u64>() - hidden;
    let left_out = filters.is_empty().then(|| total.saturating_sub(sessions.len() as u64));
    let rest = rest(more, left_out, hidden);
    if let Some(rest) = rest {
        ctx.print.note(rest);
        ctx.print.hint("`harvest ls --all` shows all sessions, `-n COUNT` as many as you want");
    }
    Ok(0)
}

/// What the list leaves out. The number of further sessions is known without filters only.
fn rest(more: bool, left_out: Option<u64>, archived: u64) -> Option<String> {
    let further = match (more, left_out) {
        (false, _) => None,
        (true, Some(number)) => Some(format!("{number} more")),
        (true, None) => Some("more".to_owned()),
    };
    let archived = (archived > 0).then(|| format!("{archived} archived"));
    let parts: Vec<String> = [further, archived].into_iter().flatten().collect();
    (!parts.is_empty()).then(|| format!("and {}", parts.join(", ")))
}

fn row(session: &Session) -> [String; 7] {
    let number = session.pr_number.map(|number| format!("#{number}"));
    [
        session.id.to_string(),
        state(session),
        age(session.created_at),
        session.turns.to_string(),
        number.unwrap_or_else(|| "–".to_owned()),
        repositories(session),
        title(session),
    ]
}

/// A fork has its parent's title, so it begins with the parent and the turn: `↳4kq2@1`.
fn title(session: &Session) -> String {
    let Some(parent) = &session.forked_from else { return session.title.clone() };
    let parent: String = parent.part().chars().take(4).collect();
    let turn = session.forked_turn.map_or_else(String::new, |turn| format!("@{turn}"));
    format!("↳{parent}{turn} {}", session.title)
}

/// The state, with the queue position while the session waits for a slot (`#1`) or the number of
/// queued prompts (`+1`).
fn state(session: &Session) -> String {
    let state = session.state.as_str();
    match (session.position, session.queued) {
        (Some(position), _) => format!("{state} #{position}"),
        (None, 0) => state.to_owned(),
        (None, queued) => format!("{state} +{queued}"),
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
pub(crate) fn age(at: Timestamp) -> String {
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

    #[test]
    fn list_says_what_it_leaves_out() {
        assert_eq!(rest(false, Some(0), 0), None);
        assert_eq!(rest(true, Some(12), 3).as_deref(), Some("and 12 more, 3 archived"));
        assert_eq!(rest(true, None, 0).as_deref(), Some("and more"));
        assert_eq!(rest(false, Some(0), 1).as_deref(), Some("and 1 archived"));
    }
}
