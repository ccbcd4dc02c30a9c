//! Events: everything that happened in a session, numbered without gaps, append-only.
//!
//! This is the one table of kinds and fields. The supervisor makes those that come from the agent,
//! the server those about the session itself; clients read one stream of both.

use serde::{Deserialize, Serialize};

use crate::{BlobId, PromptId, SandboxId, SnapshotId, Timestamp, TurnId, api::SessionState};

/// One stored event.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Event {
    /// The session's own number for it: 1, 2, 3… without a gap. SSE id and cursor.
    pub seq: u64,
    /// When it happened.
    pub at: Timestamp,
    /// The turn it belongs to, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub turn: Option<TurnId>,
    /// What happened.
    #[serde(flatten)]
    pub body: EventBody,
}

/// What happened. `type` names the kind; the other fields depend on it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum EventBody {
    /// The session changed its state.
    StateChanged {
        /// The new state.
        state: SessionState,
        /// Why, as a word that programs may compare (`created`, `terminated`, `sandbox_lost`…).
        reason: String,
        /// Why, in words for people, where the word alone does not say enough.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        detail: Option<String>,
    },
    /// The session waits for a place on the machine; its place in line is another one now.
    Waiting {
        /// 1 is the next.
        position: u32,
    },
    /// A prompt was stored in the queue.
    PromptQueued {
        /// Which.
        prompt: PromptId,
        /// What it says.
        text: String,
        /// Who wrote it.
        author: String,
    },
    /// A prompt left the queue without being carried out.
    PromptCancelled {
        /// Which.
        prompt: PromptId,
    },
    /// The queue's order changed.
    PromptMoved {
        /// Which prompt moved.
        prompt: PromptId,
        /// Its new place, 1 being the next.
        position: u32,
    },
    /// A sandbox was started for the session.
    SandboxStarted {
        /// Which.
        sandbox: SandboxId,
        /// The session's count of sandboxes so far.
        epoch: u64,
        /// What it was started from.
        from: String,
        /// How long that took.
        millis: u64,
    },
    /// The session's sandbox is no more.
    SandboxEnded {
        /// Which.
        sandbox: SandboxId,
        /// `paused`, `terminated`, `oom`, `killed`, `exited`…
        reason: String,
    },
    /// A step of getting a sandbox ready began, ended or failed.
    BootPhase {
        /// Which step.
        phase: BootPhase,
        /// How it stands.
        status: PhaseStatus,
        /// How long it took, once it ended.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        millis: Option<u64>,
        /// The last lines it printed, when it failed.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        tail: Option<String>,
    },
    /// A turn began.
    TurnStarted {
        /// The prompt it carries out.
        prompt: PromptId,
        /// The turn's number in its session: 1, 2, 3…
        number: u32,
    },
    /// The agent wrote a piece of its answer.
    TextDelta {
        /// The piece.
        text: String,
    },
    /// The agent thought aloud.
    ThoughtDelta {
        /// The piece.
        text: String,
    },
    /// The agent called a tool.
    ToolStarted {
        /// The agent's own id of the call.
        call: String,
        /// The tool.
        name: String,
        /// Its arguments.
        input: serde_json::Value,
        /// The call this one was made for, in a sub-agent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        parent: Option<String>,
        /// The arguments in full, as JSON, where `input` is cut.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        blob: Option<Blob>,
    },
    /// A tool answered.
    ToolEnded {
        /// The agent's own id of the call.
        call: String,
        /// Whether it worked.
        ok: bool,
        /// What it said, head and tail when long.
        output: String,
        /// What it said in full, where `output` is cut.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        blob: Option<Blob>,
    },
    /// The agent waits for a person.
    RequestOpened {
        /// The agent's own id of the request.
        request: String,
        /// The question, in words.
        question: String,
        /// The answers it offers, if it offers any.
        #[serde(default)]
        options: Vec<String>,
    },
    /// A person answered, or the turn ended without an answer.
    RequestClosed {
        /// Which.
        request: String,
        /// The answer, if there was one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        answer: Option<String>,
    },
    /// The model's service made the agent wait.
    Retry {
        /// Which attempt comes next.
        attempt: u32,
        /// When, from now.
        after_millis: u64,
        /// The HTTP status that caused it, if there was one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        status: Option<u16>,
    },
    /// The agent shortened its conversation.
    Compacted {},
    /// The agent process ended when it should not have.
    AgentExited {
        /// How.
        exit: crate::bridge::Exit,
        /// The last lines it wrote to stderr.
        tail: String,
        /// Whether it is started again.
        restarts: bool,
    },
    /// A turn ended.
    TurnEnded {
        /// The prompt it carried out.
        prompt: PromptId,
        /// How it ended.
        outcome: TurnOutcome,
        /// What went wrong, when something did.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        error: Option<String>,
        /// How long it took.
        millis: u64,
    },
    /// The machine was kept.
    SnapshotTaken {
        /// The snapshot.
        snapshot: SnapshotId,
        /// Why it was taken.
        kind: SnapshotKind,
        /// How long the machine stood still for it.
        millis: u64,
    },
    /// The session was put back to the state of an earlier turn, or begins as a fork of another.
    Restored {
        /// Where it goes on from.
        snapshot: SnapshotId,
        /// In words: `fork of ses_… at turn 1`.
        detail: String,
    },
    /// A model call passed the gateway.
    ModelCall {
        /// `anthropic` or `scripted`.
        upstream: String,
        /// The model asked for.
        model: String,
        /// The HTTP status.
        status: u16,
        /// Tokens.
        usage: Usage,
        /// From request to the last byte.
        millis: u64,
    },
    /// The policy refused a connection or a look-up.
    EgressRefused {
        /// The name.
        name: String,
        /// Why.
        reason: String,
    },
    /// A push passed the gateway.
    Pushed {
        /// The repository's name.
        repository: String,
        /// The branch.
        branch: String,
        /// Its new commit.
        commit: String,
    },
    /// The gateway refused a push.
    PushRefused {
        /// The repository's name.
        repository: String,
        /// Why.
        reason: String,
    },
    /// A pull request was opened, or an open one now shows another commit.
    PullOpened {
        /// The repository's name; absent in events of older versions.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        repository: Option<String>,
        /// Its number at the forge.
        number: u64,
        /// Where to look at it.
        url: String,
        /// The branch it proposes.
        branch: String,
    },
    /// The platform itself ran the repository's check on a pushed commit, in a fresh sandbox.
    Evidence(crate::api::Evidence),
    /// Something a person should know that stopped nothing.
    Warning {
        /// In words.
        message: String,
    },
    /// A line of the agent that we have no word for, kept for whoever looks into it.
    AgentRaw {
        /// The line, cut at 4 KiB.
        line: String,
    },
}

impl EventBody {
    /// Where the whole of it is, if it is only part of something.
    #[must_use]
    pub const fn blob(&self) -> Option<&Blob> {
        match self {
            Self::ToolStarted { blob, .. } | Self::ToolEnded { blob, .. } => blob.as_ref(),
            _ => None,
        }
    }

    /// The whole could not be kept: only the part there is.
    pub fn forget_blob(&mut self) {
        if let Self::ToolStarted { blob, .. } | Self::ToolEnded { blob, .. } = self {
            *blob = None;
        }
    }
}

/// The whole of something an event holds only the ends of: `GET /v1/sessions/{session}/blobs/{id}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Blob {
    /// Its id in the session.
    pub id: BlobId,
    /// How long it is.
    pub bytes: u64,
}

/// The steps of getting a sandbox ready, in their order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum BootPhase {
    /// The supervisor runs and has its orders.
    Starting,
    /// The checkouts are brought up to date.
    Sync,
    /// `.harvest/setup.sh`, where the image does not hold its result yet.
    Setup,
    /// `.harvest/start.sh`.
    Start,
    /// The agent starts.
    Agent,
    /// Prompts are taken.
    Ready,
}

/// How a boot phase stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum PhaseStatus {
    /// It began.
    Started,
    /// It ended well.
    Done,
    /// There was nothing to do.
    Skipped,
    /// It failed; boot ends here.
    Failed,
}

/// How a turn ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum TurnOutcome {
    /// The agent said it was done.
    Completed,
    /// The agent or the model's service gave up.
    Failed,
    /// Somebody stopped it.
    Stopped,
    /// Its sandbox was lost, and with it the turn; it is not run again by itself.
    Interrupted,
}

/// Why a snapshot was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum SnapshotKind {
    /// A turn ended.
    Turn,
    /// The session was paused, by a person or by the idle clock.
    Pause,
    /// The sandbox died; this is what its disk held.
    Recovered,
    /// A repository was prebuilt.
    Build,
}

/// Tokens a model call or a session has used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Usage {
    /// Read by the model, not from a cache.
    pub input_tokens: u64,
    /// Written by the model.
    pub output_tokens: u64,
    /// Read from the provider's cache.
    #[serde(default)]
    pub cache_read_tokens: u64,
    /// Written to the provider's cache.
    #[serde(default)]
    pub cache_write_tokens: u64,
}

impl std::ops::AddAssign for Usage {
    fn add_assign(&mut self, other: Self) {
        self.input_tokens += other.input_tokens;
        self.output_tokens += other.output_tokens;
        self.cache_read_tokens += other.cache_read_tokens;
        self.cache_write_tokens += other.cache_write_tokens;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_reads_as_one_flat_object_with_its_type() {
        let event = Event {
            seq: 7,
            at: Timestamp::from_millis(0),
            turn: None,
            body: EventBody::TextDelta { text: "hi".into() },
        };
        let json = serde_json::to_string(&event).unwrap();
        assert_eq!(
            json,
            r#"{"seq":7,"at":"1970-01-01T00:00:00.000Z","type":"text_delta","text":"hi"}"#
        );
        assert_eq!(serde_json::from_str::<Event>(&json).unwrap(), event);
    }

    #[test]
    fn evidence_survives_lying_flat_in_its_event() {
        let evidence = crate::api::Evidence {
            repository: Some("calc".into()),
            commit: "c0ffee".into(),
            check: ".harvest/check.sh".into(),
            passed: true,
            exit: crate::bridge::Exit::Code(0),
            millis: 1,
            tail: String::new(),
            at: Timestamp::from_millis(1),
        };
        let event = Event {
            seq: 7,
            at: Timestamp::from_millis(2),
            turn: None,
            body: EventBody::Evidence(evidence),
        };
        let json = serde_json::to_string(&event).unwrap();
        assert_eq!(serde_json::from_str::<Event>(&json).unwrap(), event, "{json}");
    }

    #[test]
    fn events_stored_before_they_named_their_repository_are_read() {
        let pull = r#"{"type":"pull_opened","number":1,"url":"u","branch":"b"}"#;
        let evidence = r#"{"type":"evidence","commit":"c","check":"none declared","passed":false,"exit":{"how":"code","value":127},
            "millis":0,"tail":"","checked_at":"1970-01-01T00:00:00.000Z"}"#;
        for old in [pull, evidence] {
            let body: EventBody = serde_json::from_str(old).unwrap();
            let new = serde_json::to_value(&body).unwrap();
            assert_eq!(new, serde_json::from_str::<serde_json::Value>(old).unwrap());
        }
    }
}
