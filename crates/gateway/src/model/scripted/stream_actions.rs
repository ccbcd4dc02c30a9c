//! The actions of sending a streamed response of the scripted model, in any protocol.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use harvest_proto::PromptId;
use serde_json::Value;

use super::Part;

/// An action of sending a streamed response.
#[derive(Debug, PartialEq)]
pub(super) enum StreamAction {
    Send(String),
    /// Is counted like what is sent, but the agent has not asked for it.
    Count(String),
    Wait(Duration),
    Drop,
}

impl StreamAction {
    /// A server-sent event with a name.
    pub(super) fn event(name: &str, data: &Value) -> Self {
        Self::Send(format!("event: {name}\ndata: {data}\n\n"))
    }

    /// A server-sent event without a name.
    pub(super) fn data(data: &Value) -> Self {
        Self::Send(format!("data: {data}\n\n"))
    }
}

/// The actions of the parts of a response in order, up to a drop.
pub(super) struct Actions {
    pub(super) list: Vec<StreamAction>,
    pub(super) dropped: bool,
}

impl Actions {
    pub(super) fn new() -> Self {
        Self { list: Vec::new(), dropped: false }
    }

    pub(super) fn push(&mut self, action: StreamAction) {
        if !self.dropped {
            self.list.push(action);
        }
    }

    /// Adds a part that is no content; false for content.
    pub(super) fn pause(&mut self, part: &Part) -> bool {
        match part {
            Part::Hang(time) => self.push(StreamAction::Wait(*time)),
            Part::Drop => {
                self.push(StreamAction::Drop);
                self.dropped = true;
            }
            Part::Text { .. } | Part::Thinking(_) | Part::Call { .. } => return false,
        }
        true
    }

    /// Waits between the chunks of a text.
    pub(super) fn delay(&mut self, part: &Part) {
        if let Part::Text { delay, .. } = part
            && !delay.is_zero()
        {
            self.push(StreamAction::Wait(*delay));
        }
    }
}

pub(super) fn fresh_id(prefix: &str) -> String {
    // Our ids carry 60 random bits; two of them look like the API's in length.
    format!("{prefix}_{}{}", PromptId::random().part(), PromptId::random().part())
}

/// Seconds since 1970.
pub(super) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}
