//! Repositories, their builds, and what was seen of them: pull requests and evidence.

use serde::{Deserialize, Serialize};

use crate::{SnapshotId, Timestamp};

/// `POST /v1/repositories`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct AddRepository {
    /// Where it is: an http or https URL.
    pub url: String,
    /// What to call it; the URL's last part when absent.
    #[serde(default)]
    pub name: Option<String>,
    /// The branch work starts from; the remote's default when absent.
    #[serde(default)]
    pub base: Option<String>,
    /// The secret that opens it: a token for HTTP basic authentication.
    #[serde(default)]
    pub secret: Option<String>,
    /// The image sandboxes start from; the default one when absent.
    #[serde(default)]
    pub image: Option<String>,
}

/// A repository as it stands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Repository {
    /// What it is called.
    pub name: String,
    /// Where it is.
    pub url: String,
    /// The branch work starts from.
    pub base: Option<String>,
    /// The name of the secret that opens it.
    pub secret: Option<String>,
    /// The image sandboxes start from.
    pub image: String,
    /// Its newest good build.
    pub build: Option<Build>,
    /// When it was added.
    pub created_at: Timestamp,
}

/// A repository's prebuilt state.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Build {
    /// The snapshot sessions start from.
    pub snapshot: SnapshotId,
    /// The commit it holds.
    pub commit: String,
    /// How the check went in it, if the repository declares one.
    pub check: Option<Evidence>,
    /// How long it took.
    pub millis: u64,
    /// When it was made.
    pub built_at: Timestamp,
}

/// One line of the answer to `POST /v1/repositories/{name}/build`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum BuildLine {
    /// Something a person may want to see meanwhile.
    Progress {
        /// In words.
        message: String,
    },
    /// Done; nothing follows.
    Built {
        /// What sessions start from now.
        build: Build,
    },
    /// It failed and the older build stays; nothing follows.
    Failed {
        /// A word that programs may compare.
        code: String,
        /// What happened, with the last lines the failing step printed.
        message: String,
    },
}

/// A pull request as we recorded it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Pull {
    /// Its number at the forge.
    pub number: u64,
    /// Where to look at it.
    pub url: String,
    /// What it is called.
    pub title: String,
    /// What it says.
    pub body: String,
    /// `open`, `merged` or `closed`.
    pub state: String,
    /// The branch it proposes.
    pub branch: String,
    /// The branch it is for.
    pub base: String,
    /// The commit it proposes.
    pub commit: String,
    /// What the platform itself saw.
    pub evidence: Option<Evidence>,
}

/// What the platform saw when it ran the repository's declared check on a commit, in a sandbox the
/// agent never touched.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Evidence {
    /// The repository's name; absent in what older versions stored.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repository: Option<String>,
    /// The commit checked out.
    pub commit: String,
    /// What ran.
    pub check: String,
    /// Whether it passed.
    pub passed: bool,
    /// How it ended.
    pub exit: crate::bridge::Exit,
    /// How long it took.
    pub millis: u64,
    /// The last lines it printed.
    pub tail: String,
    /// When.
    // Not `at`: as an event it lies flat beside the event's own `at`.
    #[serde(rename = "checked_at")]
    pub at: Timestamp,
}
