//! `harvest show`: one session as it stands, with its turns.

use anyhow::Result;
use harvest_proto::api::{Session, SessionRepository, Turn};
use serde_json::json;

use crate::{Invocation, cli::One, client::Client, printer::took, render::cut, resolve};

pub(crate) async fn run(here: &Invocation, args: &One) -> Result<u8> {
    let client = Client::find(&here.config)?;
    let id = resolve::session(&client, &args.session).await?;
    let session = client.session(&id).await?;
    let turns = client.turns(&id).await?;
    match here.print.json {
        true => {
            here.print.result(&json!({ "session": session, "turns": turns }), |_| String::new())?
        }
        false => here.print.out(&text(&session, &turns))?,
    }
    Ok(0)
}

/// A session in lines of `name  value`.
pub(crate) fn text(session: &Session, turns: &[Turn]) -> String {
    let usage = session.usage;
    let read = usage.input_tokens + usage.cache_read_tokens + usage.cache_write_tokens;
    let mut lines = vec![
        ("session", session.id.to_string()),
        ("title", cut(&session.title, 100)),
        ("state", format!("{} ({})", session.state.as_str(), session.reason)),
        ("branch", session.branch.clone()),
        (
            "agent",
            format!("{} ({})", session.agent, session.model.as_deref().unwrap_or("its own model")),
        ),
        ("network", session.network.clone()),
        ("author", format!("{} <{}>", session.author.name, session.author.email)),
        ("tokens", format!("{read} in, {} out", usage.output_tokens)),
        ("queued", session.queued.to_string()),
    ];
    let mut add = |name, value: Option<String>| lines.extend(value.map(|value| (name, value)));
    add("in line", session.position.map(|position| format!("number {position}")));
    for repository in &session.repositories {
        add("repository", Some(repository_line(repository)));
    }
    add("sandbox", session.sandbox.as_ref().map(ToString::to_string));
    add("snapshot", session.snapshot.as_ref().map(ToString::to_string));
    let turn = session.forked_turn.map_or_else(String::new, |turn| format!("@{turn}"));
    add("forked from", session.forked_from.as_ref().map(|from| format!("{from}{turn}")));
    add("variables", Some(session.env.join(" ")).filter(|names| !names.is_empty()));
    add("key", session.key.clone());
    add("created", Some(session.created_at.to_string()));
    add("active", Some(session.last_activity.to_string()));
    for pull in session.repositories.iter().filter_map(|repository| repository.pull.as_ref()) {
        add("pull", Some(format!("#{} {} {}", pull.number, pull.state, pull.url)));
    }
    let lines = lines.iter().map(|(name, value)| format!("{name:<12}{value}\n"));
    lines.chain(turns.iter().map(turn_line)).collect()
}

fn repository_line(repository: &SessionRepository) -> String {
    let base = repository.base.as_ref().map_or_else(String::new, |base| format!(" from {base}"));
    format!("{}{base} {}", repository.name, repository.url)
}

fn turn_line(turn: &Turn) -> String {
    let outcome = turn
        .outcome
        .map_or_else(|| "running".into(), |outcome| format!("{outcome:?}").to_lowercase());
    let time = turn.ended_at.map_or_else(String::new, |ended| {
        let millis = ended.since(turn.started_at).as_millis();
        format!(" in {}", took(u64::try_from(millis).unwrap_or(u64::MAX)))
    });
    let kept =
        turn.snapshot.as_ref().map_or_else(String::new, |snapshot| format!(", kept as {snapshot}"));
    format!("turn {:<7}{outcome}{time}{kept}\n", turn.number)
}
