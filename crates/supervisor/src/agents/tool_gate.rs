//! Which tool calls of an agent may run while the checkouts are synced beside it. Pure.

use std::collections::BTreeSet;

use harvest_proto::event::ToolKind;

use crate::truncate::MAX_NAME_BYTES;

// An agent and its sub-agents run a few calls at once. The limits keep a hostile agent from growing
// the supervisor.
const MAX_HELD: usize = 64;
const MAX_OPEN: usize = 256;

const TOO_MANY: &str = "Too many tool calls wait for the sync of the checkout.";

/// A tool call that waits for permission.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ToolRequest {
    /// The agent's id of the question.
    pub(crate) request: String,
    /// The agent's id of the call.
    pub(crate) call: String,
    pub(crate) kind: ToolKind,
}

/// What happens to a tool call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ToolDecision {
    Run,
    /// The answer comes later, or never if the prompt was cancelled.
    Wait,
    /// The model is told this.
    Refuse(String),
}

/// The tool calls of a prompt.
#[derive(Debug, Default)]
pub(super) struct ToolGate {
    held: Vec<ToolRequest>,
    /// Calls that the model has made and that have not ended.
    open: BTreeSet<String>,
    /// Those of them that it made before it could know the note.
    outdated: BTreeSet<String>,
    /// What has changed.
    note: Option<Note>,
    cancelled: bool,
}

#[derive(Debug)]
struct Note {
    text: String,
    told: bool,
}

impl ToolGate {
    /// Returns a note that the model has not been told, for the front of the prompt.
    pub(super) fn begin_prompt(&mut self) -> Option<String> {
        let untold = self.note.take().filter(|note| !note.told).map(|note| note.text);
        *self = Self::default();
        untold
    }

    pub(super) fn cancel_prompt(&mut self) {
        self.held.clear();
        self.cancelled = true;
    }

    pub(super) fn call_started(&mut self, call: &str) {
        if self.open.len() < MAX_OPEN && call.len() <= MAX_NAME_BYTES {
            self.open.insert(call.to_owned());
        }
    }

    pub(super) fn call_ended(&mut self, call: &str) {
        self.open.remove(call);
        self.outdated.remove(call);
    }

    pub(super) fn ask(&mut self, tool: ToolRequest, syncing: bool) -> ToolDecision {
        if self.cancelled {
            return ToolDecision::Wait;
        }
        if syncing {
            return match tool.kind {
                ToolKind::Read | ToolKind::Search => ToolDecision::Run,
                _ if self.held.len() >= MAX_HELD => ToolDecision::Refuse(TOO_MANY.to_owned()),
                _ => {
                    self.held.push(tool);
                    ToolDecision::Wait
                }
            };
        }
        match &mut self.note {
            Some(note) if !note.told || self.outdated.contains(&tool.call) => {
                note.told = true;
                ToolDecision::Refuse(note.text.clone())
            }
            _ => ToolDecision::Run,
        }
    }

    /// The agent has withdrawn its question.
    pub(super) fn withdraw(&mut self, request: &str) {
        self.held.retain(|tool| tool.request != request);
    }

    /// The sync has ended: decides on the calls that waited. `told` says whether the model gets the
    /// note by other means than a refusal.
    pub(super) fn release(
        &mut self,
        note: Option<String>,
        told: bool,
    ) -> Vec<(ToolRequest, ToolDecision)> {
        let held = std::mem::take(&mut self.held);
        if let Some(text) = note {
            self.outdated = self.open.clone();
            self.note = Some(Note { text, told: told || !held.is_empty() });
        }
        let refusal = self.note.as_ref().map(|note| note.text.clone());
        let decision = || refusal.clone().map_or(ToolDecision::Run, ToolDecision::Refuse);
        held.into_iter().map(|tool| (tool, decision())).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn tool(call: &str, kind: ToolKind) -> ToolRequest {
        ToolRequest { request: format!("ask {call}"), call: call.to_owned(), kind }
    }

    const KINDS: [ToolKind; 7] = [
        ToolKind::Read,
        ToolKind::Search,
        ToolKind::Edit,
        ToolKind::Execute,
        ToolKind::Fetch,
        ToolKind::Think,
        ToolKind::Other,
    ];

    #[test]
    fn only_reads_and_searches_run_during_sync() {
        for kind in KINDS {
            let mut gate = ToolGate::default();
            let runs = gate.ask(tool("a", kind), true) == ToolDecision::Run;
            assert_eq!(runs, matches!(kind, ToolKind::Read | ToolKind::Search), "{kind:?}");
            assert_eq!(gate.release(None, false).len(), usize::from(!runs));
        }
    }

    #[test]
    fn calls_made_before_the_note_are_refused() {
        let mut gate = ToolGate::default();
        for call in ["a", "b"] {
            gate.call_started(call);
        }
        assert_eq!(gate.ask(tool("a", ToolKind::Execute), true), ToolDecision::Wait);
        let refused = ToolDecision::Refuse("changed".into());
        let released = gate.release(Some("changed".into()), false);
        assert_eq!(released, [(tool("a", ToolKind::Execute), refused.clone())]);
        gate.call_ended("a");
        assert_eq!(gate.ask(tool("b", ToolKind::Execute), false), refused, "made at the same time");
        gate.call_started("c");
        assert_eq!(gate.ask(tool("c", ToolKind::Execute), false), ToolDecision::Run);
        assert_eq!(gate.begin_prompt(), None, "it was told");
    }

    #[test]
    fn next_tool_or_prompt_tells_the_note() {
        let mut gate = ToolGate::default();
        assert_eq!(gate.release(Some("changed".into()), false), []);
        let first = gate.ask(tool("a", ToolKind::Read), false);
        assert_eq!(first, ToolDecision::Refuse("changed".into()));
        assert_eq!(gate.ask(tool("b", ToolKind::Read), false), ToolDecision::Run);
        gate.release(Some("again".into()), false);
        assert_eq!(gate.begin_prompt().as_deref(), Some("again"));
        assert_eq!(gate.begin_prompt(), None);
    }

    #[test]
    fn cancelled_prompt_runs_nothing_more() {
        let mut gate = ToolGate::default();
        gate.ask(tool("a", ToolKind::Edit), true);
        gate.cancel_prompt();
        assert_eq!(gate.release(None, false), []);
        assert_eq!(gate.ask(tool("b", ToolKind::Read), false), ToolDecision::Wait);
        gate.begin_prompt();
        assert_eq!(gate.ask(tool("c", ToolKind::Edit), false), ToolDecision::Run);
    }

    proptest! {
        #[test]
        fn every_call_is_answered_once(kinds in proptest::collection::vec(0..7usize, 0..100)) {
            let mut gate = ToolGate::default();
            let mut answered = 0;
            for (number, kind) in kinds.iter().enumerate() {
                let call = number.to_string();
                gate.call_started(&call);
                let decision = gate.ask(tool(&call, KINDS[*kind]), true);
                answered += usize::from(decision != ToolDecision::Wait);
            }
            answered += gate.release(None, false).len();
            prop_assert_eq!(answered, kinds.len());
            prop_assert_eq!(gate.release(None, false).len(), 0);
        }
    }
}
