//! Events of a session: append-only, numbered without gaps. The supervisor creates the agent's
//! events, the server those about the session itself; clients read both as one stream.

mod agent;
mod sync;

use serde::{Deserialize, Serialize};

pub use self::agent::{McpServer, McpState, PlanStep, StepStatus, ToolKind};
pub use self::sync::{CheckoutSync, CommittedWork, SavedWork, SyncOutcome};
use crate::{
    BlobId, BranchName, PromptId, RepositoryName, SandboxId, SnapshotId, StateReason, Timestamp,
    TurnId, TurnReason,
    api::{Attachment, RepositoryConfig, SessionState},
};

/// A stored event.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Event {
    /// Number of the event in its session: 1, 2, 3… without gaps. SSE id and cursor.
    pub seq: u64,
    /// Time of the event.
    pub at: Timestamp,
    /// The turn the event belongs to, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub turn: Option<TurnId>,
    /// Type and fields of the event.
    #[serde(flatten)]
    pub body: EventBody,
}

/// Content of an event. `type` is the kind; the other fields depend on it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum EventBody {
    /// The session's state changed.
    StateChanged {
        /// The new state.
        state: SessionState,
        /// Reason for programs.
        reason: StateReason,
        /// Reason for people, when the code alone is not enough.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        detail: Option<String>,
    },
    /// The session waits for a sandbox slot, and its position in the queue changed.
    Waiting {
        /// Position in the queue; 1 is next.
        position: u32,
    },
    /// A prompt was added to the queue.
    PromptQueued {
        /// Id of the prompt.
        prompt: PromptId,
        /// Text of the prompt.
        text: String,
        /// Name of the author.
        author: String,
        /// Its images.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        attachments: Vec<Attachment>,
    },
    /// A queued prompt was removed without being run.
    PromptCancelled {
        /// Id of the prompt.
        prompt: PromptId,
    },
    /// A prompt was moved within the queue.
    PromptMoved {
        /// Id of the prompt.
        prompt: PromptId,
        /// New position; 1 is next.
        position: u32,
    },
    /// A sandbox started for the session.
    SandboxStarted {
        /// Id of the sandbox.
        sandbox: SandboxId,
        /// Number of the session's sandbox: 1, 2, 3…
        epoch: u64,
        /// Image or snapshot it was started from.
        from: String,
        /// What was prepared before the session wanted it.
        way: StartWay,
        /// Duration of the start.
        millis: u64,
    },
    /// The session's sandbox stopped or was removed.
    SandboxEnded {
        /// Id of the sandbox.
        sandbox: SandboxId,
        /// `paused`, `terminated`, `oom`, `killed`, `exited`…
        reason: String,
    },
    /// A boot phase started, ended or failed.
    BootPhase {
        /// The phase.
        phase: BootPhase,
        /// Status of the phase.
        status: PhaseStatus,
        /// Duration of the phase, once it has ended.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        millis: Option<u64>,
        /// Last lines of its output, when it failed.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        tail: Option<String>,
        /// Why it failed.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        failure: Option<BootFailure>,
    },
    /// The checkouts were brought up to date with their remotes.
    Synced {
        /// The checkouts, the primary one first.
        checkouts: Vec<SyncedCheckout>,
        /// Duration of the sync.
        millis: u64,
    },
    /// A checkout's base commit has a `.harvest/config.toml`.
    RepositoryConfig {
        /// The repository.
        repository: RepositoryName,
        /// What the file says.
        config: Box<RepositoryConfig>,
    },
    /// A requested sync ended: each checkout's uncommitted work is committed, and its branch
    /// rebased onto the base if that is possible without a conflict.
    SyncEnded {
        /// The checkouts, the primary one first.
        checkouts: Vec<CheckoutSync>,
        /// Duration of the sync.
        millis: u64,
    },
    /// The session is to have a pull request, and its agent left work behind at the end of the
    /// turn: Harvest committed and pushed it in the name of the prompt's author.
    WorkSaved(SavedWork),
    /// A command that installs dependencies of a checkout ended.
    InstallStep {
        /// Folder of the project below `/workspace`.
        folder: String,
        /// The program that manages the dependencies: `npm`, `pip`, …
        manager: String,
        /// The command as people would type it.
        command: String,
        /// Duration of the command.
        millis: u64,
        /// How it failed: `exited with code 1`. A failed step ends a build but not a session.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        failure: Option<String>,
        /// Last lines of its output.
        #[serde(default, skip_serializing_if = "String::is_empty")]
        tail: String,
    },
    /// A turn started.
    TurnStarted {
        /// The prompt of the turn.
        prompt: PromptId,
        /// Number of the turn in its session: 1, 2, 3…
        number: u32,
    },
    /// Part of the agent's answer.
    TextDelta {
        /// The text.
        text: String,
    },
    /// Part of the agent's reasoning.
    ThoughtDelta {
        /// The text.
        text: String,
    },
    /// The agent called a tool.
    ToolStarted {
        /// The agent's id of the call.
        call: String,
        /// The agent's name of the tool.
        name: String,
        /// What the tool does.
        kind: ToolKind,
        /// Arguments of the call.
        input: serde_json::Value,
        /// The call this one belongs to, when a sub-agent made it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        parent: Option<String>,
        /// The complete arguments as JSON, when `input` was cut.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        blob: Option<Blob>,
    },
    /// A running tool wrote output. `tool_ended` has all of it.
    ToolOutput {
        /// The agent's id of the call.
        call: String,
        /// The text.
        text: String,
    },
    /// A tool call ended.
    ToolEnded {
        /// The agent's id of the call.
        call: String,
        /// True when the tool succeeded.
        ok: bool,
        /// Output of the tool; only its head and tail when long.
        output: String,
        /// The complete output, when `output` was cut.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        blob: Option<Blob>,
    },
    /// The agent asked a question and waits for the answer.
    RequestOpened {
        /// The agent's id of the question.
        request: String,
        /// The question.
        question: String,
        /// Suggested answers, if any.
        options: Vec<String>,
    },
    /// The question was answered, or the turn ended without an answer.
    RequestClosed {
        /// The agent's id of the question.
        request: String,
        /// The answer, if any.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        answer: Option<String>,
    },
    /// The agent cannot go on without a person. The session needs input once the turn has ended.
    Blocked {
        /// What cannot be fulfilled.
        criterion: String,
        /// The error in the way.
        error: String,
        /// What the agent tried.
        attempts: Vec<String>,
        /// Where the work so far is, such as a pushed commit.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        checkpoint: Option<String>,
        /// What a person has to do.
        needed_action: String,
    },
    /// The agent handed over a file: `GET /v1/sessions/{session}/artifacts/{name}`.
    Artifact {
        /// Its name.
        name: String,
        /// Its type, as the agent declared it.
        media_type: String,
        /// Its size.
        bytes: u64,
    },
    /// A model call failed and the agent will retry it.
    Retry {
        /// Number of the next attempt.
        attempt: u32,
        /// Delay before that attempt.
        after_millis: u64,
        /// HTTP status of the failed call, if any.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        status: Option<u16>,
    },
    /// The agent's process is ready, or what is known of it changed.
    AgentReady {
        /// Version of the agent, if it says so.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        version: Option<String>,
        /// Model it requests, if it says so.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        model: Option<String>,
        /// Its MCP servers.
        mcp: Vec<McpServer>,
    },
    /// The agent made or changed its plan.
    Plan {
        /// All steps of the plan.
        steps: Vec<PlanStep>,
    },
    /// The agent named the conversation.
    Title {
        /// The title.
        title: String,
    },
    /// The agent compacted its conversation.
    Compacted {},
    /// The agent process exited unexpectedly.
    AgentExited {
        /// Exit status.
        exit: crate::bridge::Exit,
        /// Last lines of its stderr.
        tail: String,
        /// True when it is restarted.
        restarts: bool,
    },
    /// A turn ended.
    TurnEnded {
        /// The prompt of the turn.
        prompt: PromptId,
        /// How the turn ended.
        outcome: TurnOutcome,
        /// Why it did not complete, for programs.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reason: Option<TurnReason>,
        /// Error message, if the turn did not complete.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        error: Option<String>,
        /// Duration of the turn.
        millis: u64,
    },
    /// A snapshot of the sandbox was taken.
    SnapshotTaken {
        /// Id of the snapshot.
        snapshot_id: SnapshotId,
        /// Reason for the snapshot.
        kind: SnapshotKind,
        /// Time for which the sandbox was frozen.
        millis: u64,
    },
    /// The session was restored to an earlier turn, or starts as a fork of another session.
    Restored {
        /// Snapshot it continues from; absent when it starts again from its repositories.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        snapshot_id: Option<SnapshotId>,
        /// Description for people: `fork of ses_… at turn 1`.
        detail: String,
    },
    /// A model call went through the gateway.
    ModelCall {
        /// Model service: `anthropic` or `scripted`.
        upstream: String,
        /// Requested model.
        model: String,
        /// HTTP status of the response.
        status: u16,
        /// Tokens used.
        usage: Usage,
        /// Time from the request to the last byte of the response.
        millis: u64,
    },
    /// The network policy refused a connection or a DNS look-up.
    EgressRefused {
        /// Host name.
        name: String,
        /// Why it was refused.
        reason: String,
        /// How to allow it, if it can be allowed.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        hint: Option<String>,
    },
    /// The agent pushed a branch.
    Pushed {
        /// Name of the repository.
        repository: RepositoryName,
        /// Name of the branch.
        branch: BranchName,
        /// New commit of the branch.
        commit: String,
    },
    /// The gateway refused a push.
    PushRefused {
        /// Name of the repository.
        repository: RepositoryName,
        /// Why it was refused.
        reason: String,
    },
    /// A pull request was opened, or got a new commit.
    PrOpened {
        /// Name of the repository.
        repository: RepositoryName,
        /// Number of the pull request at the forge.
        number: u64,
        /// Web page of the pull request.
        url: String,
        /// Branch to be merged.
        branch: BranchName,
    },
    /// No pull request was opened for a pushed branch, or an open one was not updated.
    PrSkipped {
        /// Name of the repository.
        repository: RepositoryName,
        /// Why not.
        reason: String,
        /// What to do about it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        hint: Option<String>,
    },
    /// A pull request was merged, closed or opened again.
    PrChanged {
        /// Name of the repository.
        repository: RepositoryName,
        /// Number of the pull request at the forge.
        number: u64,
        /// Web page of the pull request.
        url: String,
        /// Its new state.
        state: crate::api::PullRequestState,
    },
    /// Harvest ran the repository's check on a pushed commit, in a fresh sandbox.
    Evidence(crate::api::Evidence),
    /// A warning; the session continues.
    Warning {
        /// Text for people.
        message: String,
    },
    /// Output of the agent that Harvest does not know, for debugging.
    AgentRaw {
        /// The line, cut at 4 KiB.
        line: String,
    },
}

impl EventBody {
    /// The complete content, if this event was cut.
    #[must_use]
    pub const fn blob(&self) -> Option<&Blob> {
        match self {
            Self::ToolStarted { blob, .. } | Self::ToolEnded { blob, .. } => blob.as_ref(),
            _ => None,
        }
    }

    /// Removes the reference to the blob, when the blob could not be stored.
    pub fn remove_blob(&mut self) {
        if let Self::ToolStarted { blob, .. } | Self::ToolEnded { blob, .. } = self {
            *blob = None;
        }
    }
}

/// The complete input or output of a tool call, when its event was cut:
/// `GET /v1/sessions/{session}/blobs/{id}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Blob {
    /// Id of the blob.
    pub id: BlobId,
    /// Size of the blob.
    pub bytes: u64,
}

/// What was prepared before a session wanted its sandbox, the most first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum StartWay {
    /// A sandbox of the warm pool, with the agent started.
    Pool,
    /// The repository's build.
    Build,
    /// An earlier state of this session or of another one.
    Snapshot,
    /// Only the image: the repositories are cloned.
    Image,
}

/// Phases of a sandbox's boot, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum BootPhase {
    /// The supervisor has received the boot request.
    Starting,
    /// The checkouts are cloned or fetched.
    Sync,
    /// The dependencies of the checkouts are installed, unless the image contains them.
    Install,
    /// `.harvest/setup.sh` or the `setup` of `.harvest/config.toml` runs, unless the image contains
    /// its result.
    Setup,
    /// `.harvest/start.sh` runs.
    Start,
    /// The agent starts.
    Agent,
    /// The sandbox accepts prompts.
    Ready,
}

/// A checkout after a sync.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SyncedCheckout {
    /// Its repository.
    pub repository: RepositoryName,
    /// The commit that was checked out before; absent after a clone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub before: Option<String>,
    /// The commit that is checked out now; absent in an empty repository.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<String>,
    /// Commit or tree that the session's changes are compared with from now on, when the sync ran
    /// beside the agent and moved the checkout.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<String>,
}

/// Why a boot phase failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct BootFailure {
    /// What failed, in one line.
    pub message: String,
    /// Whether another boot would fail in the same way, so that none is tried.
    pub permanent: bool,
    /// A build cannot continue an earlier one, and starts over from the image.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub start_over: bool,
}

/// Status of a boot phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum PhaseStatus {
    /// The phase started.
    Started,
    /// The phase succeeded.
    Done,
    /// The phase had nothing to do.
    Skipped,
    /// The phase failed, and with it the boot.
    Failed,
}

/// How a turn ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum TurnOutcome {
    /// The agent finished its work.
    Completed,
    /// The agent or the model service failed.
    Failed,
    /// A user stopped the turn.
    Stopped,
    /// The sandbox was lost during the turn; the prompt is not run again automatically.
    Interrupted,
}

/// Reason for a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum SnapshotKind {
    /// A turn ended.
    Turn,
    /// The session was paused, by a user or because it was idle.
    Pause,
    /// A user asked for it; the session went on.
    Request,
    /// The sandbox died; the snapshot is the disk it left.
    Recovered,
    /// A repository was built.
    Build,
    /// A commit was checked.
    Check,
}

/// Tokens used by a model call, a turn or a session.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Usage {
    /// Input tokens that were not read from a cache.
    pub input_tokens: u64,
    /// Output tokens.
    pub output_tokens: u64,
    /// Input tokens read from the model provider's cache.
    pub cache_read_tokens: u64,
    /// Input tokens written to the model provider's cache.
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
    fn event_is_one_flat_json_object() {
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
    fn evidence_event_round_trips_as_flat_object() {
        let evidence = crate::api::Evidence {
            repository: "local/calc".parse().unwrap(),
            commit: "c0ffee".into(),
            check: ".harvest/check.sh".into(),
            command: ".harvest/check.sh".into(),
            base: None,
            base_commit: None,
            changed: Vec::new(),
            changed_count: 0,
            snapshot_id: None,
            outcome: crate::api::CheckOutcome::Passed,
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
}
