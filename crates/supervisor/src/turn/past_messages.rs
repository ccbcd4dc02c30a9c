//! The messages before a prompt, for an agent that does not remember them. Pure.

use harvest_proto::bridge::{PastMessage, Speaker};

/// The prompt with the messages in front. They are quoted, so that no line of them can be taken for
/// a part of the prompt.
pub(super) fn in_front(messages: &[PastMessage], prompt: &str) -> String {
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

/// What the turn says about it.
pub(super) fn notice(count: usize) -> String {
    format!(
        "the agent does not remember the conversation: its last {count} messages were put in front \
         of the prompt"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

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
