//! `harvest show`: prints a session with its turns.

use anyhow::Result;
use harvest_proto::{
    EventBody, Money, StateReason,
    api::{Session, SessionRepository, Turn},
};

use super::{first_start, ls::age, turns, verify::evidence_lines};
use crate::{
    Invocation,
    cli::SessionArg,
    client::Client,
    render::{event_lines, truncate},
    sanitize::{sanitize, sanitize_line},
    style::Palette,
};

/// A session that needs input does little else.
const REPORT_EVENTS: u64 = 200;

pub(crate) async fn run(ctx: &Invocation, args: &SessionArg) -> Result<u8> {
    let (client, id) = ctx.session(&args.session).await?;
    let session = client.session(&id).await?;
    if ctx.print.json {
        // As in a list; `harvest turns --json` has the turns.
        return ctx.print.document(&session).map(|()| 0);
    }
    let turns = client.turns(&id).await?;
    let first = client.events_up_to(&id, first_start::EVENTS, first_start::EVENTS).await?;
    let start = first_start::describe(&first);
    let report = report(&client, &session).await?;
    ctx.print.styled_out(&(text(ctx.print.stdout, &session, start, &turns) + &report))?;
    Ok(0)
}

/// What a session that needs input for a conflict, or because it is blocked, needs.
async fn report(client: &Client, session: &Session) -> Result<String> {
    if !matches!(session.reason, StateReason::Conflict | StateReason::Blocked) {
        return Ok(String::new());
    }
    let events = client.events_up_to(&session.id, session.seq, REPORT_EVENTS).await?;
    let is_report =
        |body: &EventBody| matches!(body, EventBody::Blocked { .. } | EventBody::SyncEnded { .. });
    let last = events.iter().rfind(|event| is_report(&event.body));
    let mut lines = last.map(|event| event_lines(&event.body)).unwrap_or_default();
    lines.iter_mut().for_each(|line| *line = sanitize_line(line) + "\n");
    Ok(lines.concat())
}

/// Formats a session as lines of `name  value`.
fn text(style: Palette, session: &Session, start: Option<String>, turns: &[Turn]) -> String {
    let usage = session.usage;
    let read = usage.input_tokens + usage.cache_read_tokens + usage.cache_write_tokens;
    let mut lines = vec![
        ("session", session.id.to_string()),
        ("title", truncate(&session.title, 100)),
        ("state", format!("{} ({})", session.state.as_str(), session.reason)),
        ("branch", session.branch.to_string()),
        ("agent", agent_line(session)),
        ("network", session.network.to_string()),
        ("author", format!("{} <{}>", session.author.name, session.author.email)),
        ("tokens", format!("{read} in, {} out", usage.output_tokens)),
        ("cost", cost_line(session)),
        ("queued", session.queued.to_string()),
    ];
    let mut add = |name, value: Option<String>| lines.extend(value.map(|value| (name, value)));
    add("slot queue", session.position.map(|position| format!("position {position}")));
    for server in session.agent_info.iter().flat_map(|info| &info.mcp) {
        add("mcp server", Some(format!("{} {}", server.name, server.state)));
    }
    for repository in &session.repositories {
        add("repository", Some(repository_line(repository)));
    }
    add("sandbox", session.sandbox.as_ref().map(ToString::to_string));
    add("start", start);
    add("snapshot", session.snapshot_id.as_ref().map(ToString::to_string));
    let turn = session.forked_turn.map_or_else(String::new, |turn| format!("@{turn}"));
    add("forked from", session.forked_from.as_ref().map(|from| format!("{from}{turn}")));
    add("variables", Some(session.env.join(" ")).filter(|names| !names.is_empty()));
    add("key", session.key.clone());
    add("created", Some(format!("{} ago", age(session.created_at))));
    add("active", Some(format!("{} ago", age(session.last_activity))));
    for pull_request in session.repositories.iter().filter_map(|repository| repository.pr.as_ref())
    {
        add(
            "pull request",
            Some(format!("#{} {} {}", pull_request.number, pull_request.state, pull_request.url)),
        );
        let evidence = pull_request.evidence.iter().flat_map(evidence_lines);
        evidence.for_each(|(name, value)| add(name, Some(value)));
    }
    let lines = lines.iter().map(|(name, value)| {
        let value = sanitize(value);
        let value = match (*name, value.split_once(' ')) {
            ("state", Some((state, reason))) => format!("{} {reason}", style.state(state)),
            _ => value,
        };
        format!("{}{value}\n", style.dim(&format!("{name:<14}")))
    });
    lines.chain(turns.iter().map(|turn| turn_line(style, turn))).collect()
}

/// `$1.20 of $2.50`
fn cost_line(session: &Session) -> String {
    let limit = session.budget_micros.map_or_else(String::new, |limit| format!(" of {limit}"));
    format!("{}{limit}", session.spent_micros)
}

/// `claude 2.1.325 (opus, effort high)`
fn agent_line(session: &Session) -> String {
    let info = session.agent_info.as_ref();
    let version = info.and_then(|info| info.version.as_deref()).map(|text| format!(" {text}"));
    let said = info.and_then(|info| info.model.as_deref());
    let model = session.model.as_deref().or(said).unwrap_or("default model");
    let effort = session.effort.map(|effort| format!(", effort {effort}"));
    let [version, effort] = [version, effort].map(Option::unwrap_or_default);
    format!("{}{version} ({model}{effort})", session.agent)
}

fn repository_line(repository: &SessionRepository) -> String {
    let base = repository.base.as_ref().map_or_else(String::new, |base| format!(" from {base}"));
    format!("{}{base} {}", repository.name, repository.url)
}

fn turn_line(style: Palette, turn: &Turn) -> String {
    let outcome = style.state(&turns::outcome(turn));
    let time = turns::took(turn).map_or_else(String::new, |time| format!(" in {time}"));
    let why = turn.reason.map_or_else(String::new, |reason| format!(" ({reason})"));
    let cost = Some(turn.spent_micros).filter(|cost| *cost > Money::ZERO);
    let cost = cost.map_or_else(String::new, |cost| format!(" for {cost}"));
    let saved = turn.snapshot_id.as_ref().map(|snapshot| format!(", saved as {snapshot}"));
    let name = style.dim(&format!("turn {:<9}", turn.number));
    format!("{name}{outcome}{why}{time}{cost}{}\n", saved.unwrap_or_default())
}
