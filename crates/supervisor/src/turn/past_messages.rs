//! The messages before a prompt, for an agent that does not remember them. Pure.

use harvest_proto::bridge::{PastMessage, Speaker, TurnRequest};

/// Puts the history of a prompt in front of it for an agent that forgot; returns what the turn says
/// about it. A prompt that was on its way when the agent crashed has no history.
pub(super) fn apply(request: &mut TurnRequest, forgot: bool) -> Option<String> {
    let history = request.history.take();
    if !forgot || request.number <= 1 {
        return None;
    }
    match history {
        Some(messages) if messages.is_empty() => None,
        Some(messages) => {
            request.text = in_front(&messages, &request.text);
            Some(notice(messages.len()))
        }
        None => Some("the agent does not remember the conversation".to_owned()),
    }
}

/// The prompt with the messages in front. They are quoted, so that no line of them can be taken for
/// a part of the prompt.
fn in_front(messages: &[PastMessage], prompt: &str) -> String {
    let message = |PastMessage { from, text }: &PastMessage| {
        let from = match from {
            Speaker::User => "User",
            Speaker::Agent => "Agent",
        };
        let quoted: String = text.lines().map(|line| format!("> {line}\n")).collect();
        format!("{from}:\n{quoted}")
    };
    let messages: String = messages.iter().map(message).collect();
    format!(
        "The work so far was done in an earlier conversation that you do not remember. Its last \
         messages, oldest first:\n\n{messages}\nThe next prompt:\n\n{prompt}"
    )
}

fn notice(count: usize) -> String {
    format!(
        "the agent does not remember the conversation: its last {count} messages were put in front \
         of the prompt"
    )
}

#[cfg(test)]
mod tests {
    use harvest_proto::bridge::Author;

    use super::*;

    #[test]
    fn history_is_used_only_when_forgotten() {
        let past = || vec![PastMessage { from: Speaker::User, text: "fix it".into() }];
        let applied = |forgot, number, history| {
            let mut request = TurnRequest {
                prompt: "prm_000000000001".parse().unwrap(),
                turn: "trn_000000000001".parse().unwrap(),
                number,
                text: "go".into(),
                images: Vec::new(),
                author: Author { name: "A".into(), email: "a@localhost".into() },
                agent: None,
                history,
                save_work: Vec::new(),
            };
            let notice = apply(&mut request, forgot);
            (request.text.contains("fix it"), notice.is_some())
        };
        assert_eq!(applied(true, 2, Some(past())), (true, true));
        assert_eq!(applied(false, 2, Some(past())), (false, false), "it was resumed");
        assert_eq!(applied(true, 2, None), (false, true));
        assert_eq!(applied(true, 2, Some(vec![])), (false, false));
        assert_eq!(applied(true, 1, None), (false, false));
    }

    #[test]
    fn messages_come_in_order_before_the_prompt() {
        let message = |from, text: &str| PastMessage { from, text: text.into() };
        let messages = [message(Speaker::User, "fix it\nnow"), message(Speaker::Agent, "done")];
        let text = in_front(&messages, "and now?");
        let at = |part: &str| text.find(part).unwrap();
        assert!(at("User:\n> fix it\n> now\n") < at("Agent:\n> done\n"), "{text}");
        assert!(text.ends_with("The next prompt:\n\nand now?"), "{text}");
    }
}
