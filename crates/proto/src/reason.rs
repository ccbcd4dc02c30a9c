//! Reasons for the state of a session, and for the end of a turn.

use crate::text::word_enum;

word_enum!(
    /// Why a session is in its state.
    StateReason, "state reason" {
        /// Queued: the session is new.
        Created = "created",
        /// Queued: the sandbox limit of the server is reached.
        LimitSandboxes = "limit_sandboxes",
        /// Queued: the sandbox limit of the user is reached.
        LimitUser = "limit_user",
        /// Queued: the server is starting or shutting down.
        ServerBusy = "server_busy",
        /// Starting: the sandbox starts or boots.
        Sandbox = "sandbox",
        /// Running: a turn is in progress, or its result is being saved.
        Turn = "turn",
        /// Idle: the sandbox accepts prompts.
        Ready = "ready",
        /// Idle: the processes of the sandbox are frozen; a prompt thaws them.
        Frozen = "frozen",
        /// The agent asked a question.
        Question = "question",
        /// The agent reported that it cannot go on without a person.
        Blocked = "blocked",
        /// A sync met a conflict; the branch is as before.
        Conflict = "conflict",
        /// A budget is used up; raising it continues the conversation.
        Budget = "budget",
        /// Paused by a user.
        Paused = "paused",
        /// Paused: a user stopped the start of the sandbox, or a stopped turn did not end in time.
        Stopped = "stopped",
        /// Paused: a user terminated the sandbox.
        Terminated = "terminated",
        /// Paused: the session was idle for too long.
        Idle = "idle",
        /// Paused: another session needed the slot.
        SlotNeeded = "slot_needed",
        /// Paused: the sandbox reached its lifetime.
        Lifetime = "lifetime",
        /// Paused: the server shut down.
        ServerShutdown = "server_shutdown",
        /// Paused: the session returned to an earlier turn.
        Restored = "restored",
        /// Paused: the supervisor refused a prompt.
        PromptRefused = "prompt_refused",
        /// Paused: the sandbox died or became unreachable; its disk is saved.
        SandboxLost = "sandbox_lost",
        /// Failed: the sandbox and its disk are gone.
        SandboxGone = "sandbox_gone",
        /// Failed: the sandbox did not start.
        StartFailed = "start_failed",
        /// Failed: the sandbox did not start in time.
        StartTimeout = "start_timeout",
        /// Failed: the sandbox did not boot.
        BootFailed = "boot_failed",
        /// Failed: the sandbox did not boot in time.
        BootTimeout = "boot_timeout",
        /// Failed: whether the last state was saved is unknown.
        SaveUnknown = "save_unknown",
        /// Archived by a user.
        Archived = "archived",
    }
);

word_enum!(
    /// Why a turn ended without being completed.
    TurnReason, "turn reason" {
        /// Failed: neither the agent nor the model wrote anything for the time of `clocks.silence`.
        Silent = "silent",
        /// Failed: the agent reported an error, its own or that of the model service.
        AgentFailed = "agent_failed",
        /// Failed: the agent's process exited.
        AgentExited = "agent_exited",
        /// Failed: the model service rejected the API key.
        KeyRejected = "key_rejected",
        /// Failed: a budget is used up.
        Budget = "budget",
        /// Failed: the checkouts could not be brought up to date.
        SyncFailed = "sync_failed",
        /// Failed: the sandbox did not accept the prompt.
        PromptRefused = "prompt_refused",
        /// Stopped by a user.
        Stopped = "stopped",
        /// Stopped: the turn took longer than `clocks.turn`.
        TimeLimit = "time_limit",
        /// Stopped: a user terminated the sandbox.
        Terminated = "terminated",
        /// Stopped: the sandbox was shut down.
        ShutDown = "shut_down",
        /// Interrupted, or stopped meanwhile: the sandbox died or became unreachable.
        SandboxLost = "sandbox_lost",
    }
);
