//! Repositories, their builds, pull requests and evidence.

use serde::{Deserialize, Serialize};

use super::RepositoryConfig;
use crate::{
    BranchName, ImageId, RepositoryName, RepositoryRef, SessionId, SnapshotId, Timestamp,
    VerificationId, text::word_enum,
};

/// `POST /v1/repositories`: registers a repository.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct AddRepository {
    /// Address of the git remote: an http or https URL, or one of `OWNER/NAME` (at GitHub),
    /// `git@HOST:OWNER/NAME` and `ssh://git@HOST/PATH`, which are read over HTTPS.
    pub url: String,
    /// Name of the repository in Harvest: `NAME` or `OWNER/NAME`. What is absent is taken from the
    /// last two segments of the URL; the owner of a URL with one segment is `local`.
    pub name: Option<RepositoryRef>,
    /// Branch that sessions start from; the remote's default branch when absent.
    pub base: Option<BranchName>,
    /// Name of the stored secret for the remote: a token for HTTP basic authentication.
    pub secret: Option<String>,
    /// Image that sandboxes start from; the default image when absent.
    pub image: Option<String>,
}

/// A registered repository.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Repository {
    /// Name of the repository in Harvest: `OWNER/NAME`.
    pub name: RepositoryName,
    /// URL of the git remote.
    pub url: String,
    /// Branch that sessions start from; null for the remote's default branch.
    pub base: Option<BranchName>,
    /// Name of the stored secret for the remote.
    pub secret: Option<String>,
    /// Image that sandboxes start from; null for the server's default.
    pub image: Option<String>,
    /// The newest successful build.
    pub build: Option<Build>,
    /// Time of registration.
    pub created_at: Timestamp,
}

/// A prebuilt repository: a snapshot with the checkout cloned, its dependencies installed and
/// `.harvest/setup.sh` run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Build {
    /// The snapshot that sessions start from.
    pub snapshot_id: SnapshotId,
    /// Provider that ran the build and has the snapshot: `local`.
    pub provider: String,
    /// The commit that was built.
    pub commit: String,
    /// The branch that was built; null for the base.
    pub branch: Option<BranchName>,
    /// The image at the bottom.
    pub image: String,
    /// Id of that image; null where the provider has no images of its own.
    pub image_id: Option<ImageId>,
    /// Number of builds on top of the image: 1 for a build from the image.
    pub layers: u32,
    /// The program that installed the dependencies, if any were found: `npm`, `pip`, …
    pub package_manager: Option<String>,
    /// Result of the repository's check in this build, if the repository has one.
    pub check: Option<Evidence>,
    /// What `.harvest/config.toml` said in the commit that was built; null without the file.
    pub config: Option<RepositoryConfig>,
    /// Duration of the build.
    pub millis: u64,
    /// Time of the build.
    pub built_at: Timestamp,
}

/// `POST /v1/repositories/{owner}/{name}/build`: builds a repository.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct BuildRepository {
    /// Branch to build instead of the base; sessions that start from that branch use the build.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub branch: Option<BranchName>,
    /// Build from the image, even if an earlier build could be continued.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub force: bool,
    /// Wait for a running build of the repository, instead of refusing the request.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub wait: bool,
}

/// `PATCH /v1/repositories/{owner}/{name}`: changes a repository. A field that is absent keeps its
/// value; null sets the default.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct UpdateRepository {
    /// Branch that sessions start from; null for the remote's default branch.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "present")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<BranchName>))]
    pub base: Option<Option<BranchName>>,
    /// Name of the stored secret for the remote; null for none.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "present")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>))]
    pub secret: Option<Option<String>>,
    /// Image that sandboxes start from; null for the server's default. The next build and sessions
    /// without a build start from it.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "present")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>))]
    pub image: Option<Option<String>>,
}

/// Tells null from an absent field.
fn present<'de, T: Deserialize<'de>, D: serde::Deserializer<'de>>(
    from: D,
) -> Result<Option<Option<T>>, D::Error> {
    Option::deserialize(from).map(Some)
}

word_enum!(
    /// Status of a build.
    BuildStatus, "build status" {
        /// It runs, or waits for its turn.
        Building = "building",
        /// Sessions can start from it.
        Ready = "ready",
        /// It failed; an earlier build stays in use.
        Failed = "failed",
    }
);

/// A build of a repository, as the list of builds shows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct BuildSummary {
    /// Identifies the build; once it is ready, sessions start from this snapshot.
    pub snapshot_id: SnapshotId,
    /// Status of the build.
    pub status: BuildStatus,
    /// The commit that was built.
    pub commit: Option<String>,
    /// The branch that was built; null for the base.
    pub branch: Option<BranchName>,
    /// The program that installed the dependencies, if any were found: `npm`, `pip`, …
    pub package_manager: Option<String>,
    /// Why the build failed.
    pub error: Option<String>,
    /// Duration of the build, once it has succeeded.
    pub millis: Option<u64>,
    /// Start of the build.
    pub started_at: Timestamp,
    /// End of the build.
    pub ended_at: Option<Timestamp>,
}

/// A build with its log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct BuildLog {
    /// The build.
    #[serde(flatten)]
    pub build: BuildSummary,
    /// What the build did, with the last lines of each command; empty until the build has ended.
    pub log: String,
}

/// One line of the response to `POST /v1/repositories/{owner}/{name}/build`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum BuildLine {
    /// Progress of the build.
    Progress {
        /// Text for a person.
        message: String,
    },
    /// The network policy refused a connection or a DNS look-up of the build.
    EgressRefused {
        /// Host name.
        name: String,
        /// Why it was refused.
        reason: String,
        /// How to allow it, if it can be allowed.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        hint: Option<String>,
    },
    /// A command that installs dependencies ended.
    InstallStep {
        /// Folder of the project below `/workspace`.
        folder: String,
        /// The program that manages the dependencies: `npm`, `pip`, …
        manager: String,
        /// The command as people would type it.
        command: String,
        /// Duration of the command.
        millis: u64,
        /// How it failed: `exited with code 1`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        failure: Option<String>,
        /// Last lines of its output.
        #[serde(default, skip_serializing_if = "String::is_empty")]
        tail: String,
    },
    /// Something failed that does not fail the build, such as the tests.
    Warning {
        /// Text for a person.
        message: String,
    },
    /// The build succeeded. Last line.
    Built {
        /// The new build.
        build: Box<Build>,
    },
    /// The build failed; the previous build stays in use. Last line.
    Failed {
        /// Error code for programs.
        code: String,
        /// What failed, with the last lines of its output.
        message: String,
    },
}

/// Begins the part of a pull request's description that Harvest keeps up to date.
pub const PULL_REQUEST_BEGIN: &str = "<!-- harvest:begin -->";
/// Ends that part.
pub const PULL_REQUEST_END: &str = "<!-- harvest:end -->";

/// A pull request as we recorded it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct PullRequest {
    /// Number of the pull request at the forge.
    pub number: u64,
    /// Web page of the pull request.
    pub url: String,
    /// Title of the pull request.
    pub title: String,
    /// Description of the pull request.
    pub body: String,
    /// Whether the pull request is open.
    pub state: PullRequestState,
    /// Whether it is a draft, which cannot be merged yet.
    pub draft: bool,
    /// Branch to be merged.
    pub branch: BranchName,
    /// Branch to merge into.
    pub base: BranchName,
    /// Newest commit of the branch.
    pub commit: String,
    /// Result of Harvest's own check of that commit.
    pub evidence: Option<Evidence>,
}

/// `POST /v1/sessions/{id}/pr`: opens pull requests of what the session has pushed, or updates the
/// open ones.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct CreatePullRequest {
    /// One of the session's repositories, `OWNER/NAME` or `NAME`; all of them when absent.
    pub repository: Option<RepositoryRef>,
    /// The title; the session's title when absent.
    #[cfg_attr(feature = "openapi", schema(min_length = 1, max_length = 256))]
    pub title: Option<String>,
    /// The description above the part that Harvest writes; the first prompt when absent.
    #[cfg_attr(feature = "openapi", schema(max_length = 40000))]
    pub body: Option<String>,
    /// Whether a new pull request is a draft; as the session was created when absent.
    pub draft: Option<bool>,
}

/// `PATCH /v1/sessions/{id}/pr`: changes an open pull request.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct UpdatePullRequest {
    /// One of the session's repositories, `OWNER/NAME` or `NAME`; the only one when absent.
    pub repository: Option<RepositoryRef>,
    /// The new title.
    #[cfg_attr(feature = "openapi", schema(min_length = 1, max_length = 256))]
    pub title: Option<String>,
    /// The new description above the part that Harvest writes.
    #[cfg_attr(feature = "openapi", schema(max_length = 40000))]
    pub body: Option<String>,
    /// Whether it is a draft from now on; `false` marks it as ready for review.
    pub draft: Option<bool>,
}

/// `POST /v1/sessions/{id}/pr/merge`: merges a pull request on the local forge.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct MergePullRequest {
    /// One of the session's repositories, `OWNER/NAME` or `NAME`; the only one when absent.
    pub repository: Option<RepositoryRef>,
}

word_enum!(
    /// What Harvest does for a branch that a session pushes.
    #[derive(Default)]
    PullRequestMode, "pull request mode" {
        /// No pull request is opened.
        None = "none",
        /// A draft is opened.
        Draft = "draft",
        /// A pull request is opened.
        #[default]
        Ready = "ready",
    }
);

impl PullRequestMode {
    /// Whether the work has to be on the remote at the end of each turn.
    #[must_use]
    pub const fn is_wanted(self) -> bool {
        matches!(self, Self::Draft | Self::Ready)
    }
}

word_enum!(
    /// State of a pull request.
    PullRequestState, "pull request state" {
        /// The branch can be merged.
        Open = "open",
        /// The branch was merged.
        Merged = "merged",
        /// The pull request was closed without a merge.
        Closed = "closed",
    }
);

word_enum!(
    /// Result of a check.
    CheckOutcome, "check outcome" {
        /// The script exited with 0.
        Passed = "passed",
        /// The script failed.
        Failed = "failed",
        /// The repository has no such script.
        NoneDeclared = "none_declared",
    }
);

/// Result of the repository's check on a commit, run by Harvest in a fresh sandbox that the agent
/// never had access to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Evidence {
    /// Name of the repository.
    pub repository: RepositoryName,
    /// The commit that was checked.
    pub commit: String,
    /// Where the check is declared: `.harvest/check.sh`, or `check` in `.harvest/config.toml`.
    pub check: String,
    /// The command that ran; empty without a check.
    pub command: String,
    /// The branch that declares the check; null for the remote's default branch.
    pub base: Option<BranchName>,
    /// The commit of that branch; null in an empty repository, and for the check of a build, which
    /// runs on the base itself.
    pub base_commit: Option<String>,
    /// Files below `.harvest` that the checked commit changes compared with the base: the first
    /// twenty. The script of the check is the base's nevertheless; the others are in effect.
    pub changed: Vec<String>,
    /// The number of all files below `.harvest` that the commit changes.
    pub changed_count: u64,
    /// The disk of the sandbox after the check; null when it was not saved. It is removed after
    /// five later checks of the repository.
    pub snapshot_id: Option<SnapshotId>,
    /// Result of the check.
    pub outcome: CheckOutcome,
    /// Exit status of the script.
    pub exit: crate::bridge::Exit,
    /// Duration of the check.
    pub millis: u64,
    /// Last lines of the script's output.
    pub tail: String,
    /// Time of the check.
    // Not `at`: an evidence event is one flat object, and `at` is the event's own time.
    #[serde(rename = "checked_at")]
    pub at: Timestamp,
}

/// `POST /v1/repositories/{owner}/{name}/verify`: runs the repository's check on a commit. Without
/// a field it is the newest commit of the base.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct VerifyRepository {
    /// A branch, or the full id of a commit.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(min_length = 1, max_length = 255))]
    pub revision: Option<String>,
    /// Number of a pull request at the repository's forge: its newest commit, and the check that
    /// the branch declares into which it is to be merged.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pull_request: Option<u64>,
}

word_enum!(
    /// Status of a verification.
    VerificationStatus, "verification status" {
        /// The check waits for a slot.
        Queued = "queued",
        /// The check runs.
        Running = "running",
        /// The check ended; `evidence` is its result.
        Done = "done",
        /// The check could not run; `error` says why.
        NotRun = "not_run",
    }
);

impl VerificationStatus {
    /// Whether the verification has ended.
    #[must_use]
    pub const fn has_ended(self) -> bool {
        matches!(self, Self::Done | Self::NotRun)
    }
}

/// One run of a repository's check on a commit, in a sandbox of its own.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Verification {
    /// Id of the verification.
    pub id: VerificationId,
    /// The repository.
    pub repository: RepositoryName,
    /// The session that pushed the commit, when it is checked for that session.
    pub session: Option<SessionId>,
    /// The branch or commit that was asked for.
    pub revision: String,
    /// The pull request that was asked for.
    pub pull_request: Option<u64>,
    /// The commit.
    pub commit: String,
    /// The branch whose check runs; null for the remote's default branch.
    pub base: Option<BranchName>,
    /// Status of the verification.
    pub status: VerificationStatus,
    /// What it does right now, for people; empty once it has ended.
    pub step: String,
    /// Result of the check.
    pub evidence: Option<Evidence>,
    /// Why the check could not run.
    pub error: Option<String>,
    /// Why the forge does not show the result.
    pub unpublished: Option<String>,
    /// Time of the request.
    pub started_at: Timestamp,
    /// End of the verification.
    pub ended_at: Option<Timestamp>,
}
