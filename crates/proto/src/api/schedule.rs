//! The schedule that keeps the builds of repositories fresh.

use serde::{Deserialize, Serialize};

use crate::{RepositoryName, Timestamp, text::word_enum};

/// `GET /v1/schedule`: the job that looks at every repository.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Schedule {
    /// When it runs, as in a crontab.
    pub cron: String,
    /// Whether an admin has paused it.
    pub paused: bool,
    /// Whether the configuration has switched it off.
    pub disabled: bool,
    /// The next run; null while it is paused or switched off.
    pub next: Option<Timestamp>,
    /// The newest run.
    pub last: Option<ScheduleRun>,
}

/// A run of the schedule.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ScheduleRun {
    /// Status of the run.
    pub status: RunStatus,
    /// The time the run was for; one that the server missed is run once, later.
    pub timestamp: Timestamp,
    /// Start of the run.
    pub started: Timestamp,
    /// End of the run.
    pub ended: Option<Timestamp>,
    /// The number of builds that it started.
    pub attempts: u64,
    /// Whether an image or a repository was rebuilt.
    pub image_rebuilt: bool,
    /// The images that were rebuilt.
    pub images: Vec<String>,
    /// The repositories that were rebuilt.
    pub rebuilt: Vec<RepositoryName>,
    /// What failed, a line for each image and repository.
    pub tail: String,
}

word_enum!(
    /// Status of a run of the schedule.
    RunStatus, "run status" {
        /// It is not over.
        Running = "running",
        /// It looked at every repository, and every build it started succeeded.
        Success = "success",
        /// A repository could not be looked at or built.
        Failed = "failed",
    }
);
