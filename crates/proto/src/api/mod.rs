//! Bodies of the HTTP API, shared by the server, the CLI and the tests. One file per resource.

mod artifacts;
mod budgets;
mod common;
mod diffs;
mod disks;
mod doctor;
mod exec;
mod images;
mod memory;
mod models;
mod network;
mod pool;
mod prompts;
mod repositories;
mod repository_config;
mod retention;
mod sandboxes;
mod schedule;
mod secrets;
mod sessions;
mod snapshots;
mod sockets;
mod tokens;
mod users;
mod volumes;

pub use artifacts::{
    Artifact, InvalidArtifact, MAX_ARTIFACT_BYTES, MAX_ARTIFACTS_BYTES, check_artifact_name,
    check_media_type,
};
pub use budgets::{Budget, SetBudget, Spending};
pub use common::{Page, Problem};
pub use diffs::{ChangeKind, DiffFiles, DiffStat, FileChange, FileChanges, FileDiff};
pub use disks::{
    CollectGarbage, DiskSpace, DiskUsage, GarbageReport, NamedSize, SandboxDiskUsage, StoreFile,
};
pub use doctor::{Finding, FindingLevel};
pub use exec::{ExecLine, ExecRequest, Language};
pub use images::{
    BUILT_IN_RECIPE, CreateImage, Image, ImageConfig, ImageLayer, ImageLine, ImageSource,
    ImageUsage, ImageUsers,
};
pub use memory::{MemoryEntity, MemoryFileError, MemoryGraph, MemoryRelation};
pub use models::{KeySource, McpService, ModelService, ServiceModels, UnusableModel};
pub use network::{
    AllowedName, NameSource, NetworkLogEntry, NetworkRule, NetworkRules, SetNetworkRule,
};
pub use pool::{PoolSandbox, PoolStatus, WarmRepository, WarmingSandbox};
pub use prompts::{
    Attachment, CreateAttachment, CreatePrompt, MovePrompt, Prompt, PromptStatus, Turn,
};
pub use repositories::{
    AddRepository, Build, BuildLine, BuildLog, BuildRepository, BuildStatus, BuildSummary,
    CheckOutcome, CreatePullRequest, Evidence, MergePullRequest, PULL_REQUEST_BEGIN,
    PULL_REQUEST_END, PullRequest, PullRequestMode, PullRequestState, Repository,
    UpdatePullRequest, UpdateRepository, Verification, VerificationStatus, VerifyRepository,
};
pub use repository_config::{RepositoryConfig, RepositoryPolicy};
pub use retention::{RetentionDrop, RetentionReport, SessionDiskUsage};
pub use sandboxes::{
    CreateSandbox, CreatedSandbox, DamagedSandbox, ForkSandbox, ForkedSandbox, RestoreSandbox,
    RestoredSandbox, Sandbox, SandboxDoor, SandboxLimits, SandboxList, SandboxNetwork,
    SandboxOwner, SandboxSnapshot, SandboxStatus, VolumeMount,
};
pub use schedule::{RunStatus, Schedule, ScheduleRun};
pub use secrets::{SecretUse, SetSecret, StoredSecret};
pub use sessions::{
    AgentInfo, CreateSession, ForkSession, RestoreSession, Session, SessionRepository,
    SessionState, SyncedSession, UseRepository,
};
pub use snapshots::{CreateSnapshot, PinSnapshot, Snapshot, SnapshotOwner, StoredSnapshot};
pub use sockets::{STDERR, STDOUT, SocketIn, SocketOut};
pub use tokens::{CreateToken, CreatedToken, Me, Role, Token};
pub use users::{SetUserLimits, User, UserLimits};
pub use volumes::{CreateVolume, Volume, VolumeBacking};
