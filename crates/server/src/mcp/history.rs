//! A session's events as text for an agent.

use harvest_proto::{Event, EventBody};
use serde::Serialize;

/// Longer outputs of tools are cut: the agent wants to know what happened, not every byte.
const MOST_CHARACTERS: usize = 600;

pub(super) fn text(events: &[Event]) -> String {
    let mut text = String::new();
    for event in events {
        match (&event.body, line(&event.body)) {
            (EventBody::TextDelta { text: part }, _) => text += part,
            (_, Some(line)) => {
                if !text.is_empty() && !text.ends_with('\n') {
                    text.push('\n');
                }
                text += &line;
                text.push('\n');
            }
            _ => {}
        }
    }
    text
}

/// An event in one line or a few; events that only programs need have none.
fn line(event: &EventBody) -> Option<String> {
    Some(match event {
        EventBody::PromptQueued { text, author, .. } => format!("> {author}: {text}"),
        EventBody::TurnStarted { number, .. } => format!("[turn {number}]"),
        EventBody::ToolStarted { name, input, .. } => {
            format!("● {name} {}", cut(&input.to_string()))
        }
        EventBody::ToolEnded { ok, output, .. } => {
            format!("  {} {}", if *ok { "✓" } else { "✗" }, cut(output))
        }
        EventBody::RequestOpened { question, options, .. } => {
            format!("? {question} ({})", options.join(" / "))
        }
        EventBody::Blocked { error, needed_action, .. } => {
            format!("[blocked: {error}; needed: {needed_action}]")
        }
        EventBody::TurnEnded { outcome, error, .. } => match error {
            Some(error) => format!("[turn {}: {error}]", word(outcome)),
            None => format!("[turn {}]", word(outcome)),
        },
        EventBody::Pushed { repository, branch, commit } => {
            format!("[pushed {branch} at {commit} to {repository}]")
        }
        EventBody::PushRefused { reason, .. } => format!("[push refused: {reason}]"),
        EventBody::PrOpened { number, url, .. } => format!("[pull request #{number} {url}]"),
        EventBody::Evidence(evidence) => {
            format!("[check of {}: {}]", evidence.commit, word(&evidence.outcome))
        }
        EventBody::Warning { message } => format!("[warning: {message}]"),
        EventBody::EgressRefused { name, reason, .. } => format!("[{name} refused: {reason}]"),
        _ => return None,
    })
}

/// A value as it is in JSON.
fn word(value: &impl Serialize) -> String {
    serde_json::to_value(value)
        .ok()
        .and_then(|value| value.as_str().map(str::to_owned))
        .unwrap_or_default()
}

/// The head and the tail of a long text.
fn cut(text: &str) -> String {
    let text = text.trim_end();
    let count = text.chars().count();
    if count <= MOST_CHARACTERS {
        return text.to_owned();
    }
    let half = MOST_CHARACTERS / 2;
    let head: String = text.chars().take(half).collect();
    let tail: String = text.chars().skip(count - half).collect();
    format!("{head} … {tail}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(body: EventBody) -> Event {
        Event { seq: 1, at: harvest_proto::Timestamp::from_millis(0), turn: None, body }
    }

    #[test]
    fn parts_of_an_answer_are_one_text() {
        let delta = |text: &str| event(EventBody::TextDelta { text: text.to_owned() });
        let warning = event(EventBody::Warning { message: "careful".to_owned() });
        let events = [delta("Hel"), delta("lo"), warning, delta("Bye")];
        assert_eq!(text(&events), "Hello\n[warning: careful]\nBye");
    }

    #[test]
    fn long_output_keeps_both_ends() {
        let long = format!("begin{}end", "x".repeat(10_000));
        let cut = cut(&long);
        assert!(cut.starts_with("begin") && cut.ends_with("end") && cut.len() < 700, "{cut}");
    }
}
