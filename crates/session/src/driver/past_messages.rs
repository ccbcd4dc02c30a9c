//! The last messages of a session, for an agent that does not remember them.

use harvest_proto::{
    SessionId,
    api::Turn,
    bridge::{PastMessage, Reply, Speaker, ToSupervisor, TurnRequest},
};
use harvest_store::{Store, StoreError};

use crate::{
    bridge::{Bridge, BridgeError},
    error_chain::error_chain,
};

// Two messages per turn.
const MAX_TURNS: usize = 5;

// Of each message. All of them fit into a frame several times.
const MAX_MESSAGE_BYTES: usize = 8 * 1024;

/// Sends a prompt again, with its history.
pub(super) async fn send_with_history(
    store: &Store,
    session: &SessionId,
    bridge: &Bridge,
    request: TurnRequest,
) -> Result<Reply, BridgeError> {
    let history = load(store, session, request.number).await.unwrap_or_else(|error| {
        tracing::warn!(%session, error = error_chain(&error), "cannot read the session's history");
        Vec::new()
    });
    let prompt = Box::new(TurnRequest { history: Some(history), ..request });
    bridge.request(|id| ToSupervisor::Prompt { id, prompt }).await
}

/// The messages that lead to this turn, oldest first.
async fn load(
    store: &Store,
    session: &SessionId,
    number: u32,
) -> Result<Vec<PastMessage>, StoreError> {
    let turns = store.turn_list(session).await?;
    let mut messages = Vec::new();
    for turn in leading_to(&turns, number) {
        let prompt = store.turn_get(session, turn.number).await?.text;
        let answer = store.turn_text(session, &turn.id, MAX_MESSAGE_BYTES).await?;
        messages.push(PastMessage { from: Speaker::User, text: end_of(prompt) });
        messages.push(PastMessage { from: Speaker::Agent, text: end_of(answer) });
    }
    messages.retain(|message| !message.text.is_empty());
    Ok(messages)
}

/// The last turns that a turn continues, oldest first. A restore leaves turns out.
fn leading_to(turns: &[Turn], number: u32) -> Vec<&Turn> {
    let of = |number: u32| turns.iter().find(|turn| turn.number == number);
    let before = |turn: &Turn| of(turn.after.unwrap_or(turn.number.saturating_sub(1)));
    let first = of(number).and_then(before).or_else(|| match of(number) {
        Some(_) => None,
        None => of(number.saturating_sub(1)),
    });
    let mut last: Vec<&Turn> =
        std::iter::successors(first, |turn| before(turn)).take(MAX_TURNS).collect();
    last.reverse();
    last
}

/// The end of a text, where the outcome is.
fn end_of(text: String) -> String {
    let cut = text.len().saturating_sub(MAX_MESSAGE_BYTES);
    let cut = (cut..text.len()).find(|index| text.is_char_boundary(*index)).unwrap_or(cut);
    if cut == 0 { text } else { format!("…{}", &text[cut..]) }
}

#[cfg(test)]
mod tests {
    use harvest_proto::{PromptId, Timestamp, TurnId};

    use super::*;

    fn turn(number: u32, after: Option<u32>) -> Turn {
        Turn {
            id: TurnId::random(),
            number,
            prompt: PromptId::random(),
            text: String::new(),
            after,
            diff: None,
            usage: Default::default(),
            spent_micros: Default::default(),
            outcome: None,
            reason: None,
            snapshot_id: None,
            dropped: None,
            started_at: Timestamp::from_millis(0),
            ended_at: None,
        }
    }

    fn numbers(turns: &[Turn], number: u32) -> Vec<u32> {
        leading_to(turns, number).iter().map(|turn| turn.number).collect()
    }

    #[test]
    fn last_five_turns_lead_to_a_turn() {
        let turns: Vec<Turn> = (1..=8).map(|number| turn(number, None)).collect();
        assert_eq!(numbers(&turns, 8), [3, 4, 5, 6, 7]);
        assert_eq!(numbers(&turns, 9), [4, 5, 6, 7, 8], "the turn is not stored yet");
        assert_eq!(numbers(&turns, 3), [1, 2]);
        assert_eq!(numbers(&turns, 1), [0; 0]);
    }

    #[test]
    fn restored_session_leaves_turns_out() {
        let turns = [turn(1, None), turn(2, None), turn(3, Some(1)), turn(4, None)];
        assert_eq!(numbers(&turns, 4), [1, 3]);
        assert_eq!(numbers(&[turn(1, None), turn(2, Some(0))], 2), [0; 0]);
    }

    #[test]
    fn long_message_keeps_its_end() {
        let text = end_of("é".repeat(10_000) + "end");
        assert!(text.len() <= MAX_MESSAGE_BYTES + 4 && text.ends_with("end"), "{}", text.len());
        assert_eq!(end_of("short".into()), "short");
    }
}
