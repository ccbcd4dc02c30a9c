//! What a new session starts from: a snapshot, the repository's build, or an image; and whether
//! that has the session's agent.

use std::collections::BTreeMap;

use harvest_proto::{
    AgentName, BranchName, RepositoryName, SnapshotId,
    api::{Build, Repository},
    bridge::BootStart,
};
use harvest_store::StoreError;

use super::Repositories;
use crate::sandboxes::{MissingObject, SandboxError, StartFrom};

/// The image with all agents: the default once it is built.
pub const ALL_AGENTS: &str = "agents";

/// The small image, whose build takes a fraction of the time.
const CLAUDE_ONLY: &str = "claude";

impl Repositories {
    /// The newest successful build of a branch, or else of the base.
    pub(super) async fn newest_build(
        &self,
        name: &RepositoryName,
        branch: Option<&BranchName>,
    ) -> Result<Option<Build>, StoreError> {
        let store = &self.shared.store;
        match branch {
            Some(_) => match store.build_newest(name, branch).await? {
                None => store.build_newest(name, None).await,
                of_branch => Ok(of_branch),
            },
            None => store.build_newest(name, None).await,
        }
    }

    /// The repository with the build that sessions on this branch start from.
    pub(crate) async fn on_branch(
        &self,
        repository: Repository,
        branch: Option<&BranchName>,
    ) -> Result<Repository, StoreError> {
        let branch = branch.filter(|branch| Some(*branch) != repository.base.as_ref());
        let build = match branch {
            Some(_) => self.newest_build(&repository.name, branch).await?,
            None => repository.build.clone(),
        };
        Ok(Repository { build, ..repository })
    }

    /// What the sandbox of a session on `repository` starts from when it has no disk yet.
    pub(crate) async fn origin(
        &self,
        repository: Option<&Repository>,
        agent: &AgentName,
    ) -> Result<StartFrom, SandboxError> {
        match repository.and_then(|repository| repository.build.as_ref()) {
            Some(build) => Ok(StartFrom::Snapshot(build.snapshot_id.clone())),
            None => Ok(StartFrom::Image(self.image(repository, agent).await?)),
        }
    }

    /// The image of a repository, or of sessions without one. An admin's choice wins over the
    /// repository's.
    pub(crate) async fn image(
        &self,
        repository: Option<&Repository>,
        agent: &AgentName,
    ) -> Result<String, SandboxError> {
        let build = repository.and_then(|repository| repository.build.as_ref());
        let config = build.and_then(|build| build.config.as_ref());
        self.image_declared(repository, config.and_then(|config| config.image.as_ref()), agent)
            .await
    }

    /// As [`Repositories::image`], for a repository that declares this image.
    pub(super) async fn image_declared(
        &self,
        repository: Option<&Repository>,
        declared: Option<&String>,
        agent: &AgentName,
    ) -> Result<String, SandboxError> {
        let named = repository.and_then(|repository| repository.image.as_ref()).or(declared);
        if let Some(image) = named.or(self.shared.image.as_ref()) {
            return Ok(image.clone());
        }
        let all = StartFrom::Image(ALL_AGENTS.to_owned());
        let has_all = self.shared.sandboxes.provider.can_start_from(&all).await?;
        Ok(default_image(agent, has_all).to_owned())
    }

    /// Refuses a session whose image, build or snapshot does not have its agent.
    pub(crate) async fn check_agent(
        &self,
        agent: &AgentName,
        repository: Option<&Repository>,
        from: Option<&SnapshotId>,
    ) -> Result<(), SandboxError> {
        let start = match from {
            Some(snapshot) => StartFrom::Snapshot(snapshot.clone()),
            None => self.origin(repository, agent).await?,
        };
        let stated = self.shared.sandboxes.provider.agents(&start).await?;
        let Some(stated) = stated else { return missing(start) };
        if has_agent(&stated, agent) {
            return Ok(());
        }
        let has = match stated.is_empty() {
            true => "it states none in `/etc/harvest/agents.json`".to_owned(),
            false => format!("it has {}", Vec::from_iter(stated.into_keys()).join(", ")),
        };
        let configured = self.shared.image.as_deref();
        let (what, hint) = describe(&start, repository.filter(|_| from.is_none()), configured);
        Err(SandboxError::conflict(
            "agent_missing",
            format!("{what} has no agent `{agent}`; {has}"),
            hint,
        ))
    }
}

/// What the disk of a sandbox that starts from a build or an image holds.
pub(crate) fn boot_start(from: &StartFrom) -> BootStart {
    match from {
        StartFrom::Snapshot(_) => BootStart::Image,
        StartFrom::Image(_) => BootStart::Fresh,
    }
}

/// The image of a session that names none. A newcomer waits only for the small image; a host
/// with the other one uses that.
#[must_use]
pub fn default_image(agent: &AgentName, has_all: bool) -> &'static str {
    let in_small = matches!(agent, AgentName::Claude | AgentName::Scripted);
    if in_small && !has_all { CLAUDE_ONLY } else { ALL_AGENTS }
}

/// The scripted agent is part of the supervisor, so every image has it. Whether an image has the
/// program of a configured agent turns out when the sandbox starts it.
fn has_agent(stated: &BTreeMap<String, String>, agent: &AgentName) -> bool {
    match agent {
        AgentName::Scripted | AgentName::Configured(_) => true,
        _ => stated.contains_key(agent.as_str()),
    }
}

fn missing(start: StartFrom) -> Result<(), SandboxError> {
    match start {
        StartFrom::Snapshot(id) => Err(SandboxError::Missing(MissingObject::Snapshot(id))),
        StartFrom::Image(image) => {
            let hint = format!("`harvest image build {image}` builds it");
            Err(SandboxError::conflict(
                "image_missing",
                format!("there is no image `{image}`"),
                hint,
            ))
        }
    }
}

/// What lacks the agent, and the commands that change that.
fn describe(
    start: &StartFrom,
    repository: Option<&Repository>,
    configured: Option<&str>,
) -> (String, String) {
    let build_all = format!("`harvest image build {ALL_AGENTS}`");
    let what = match (start, repository) {
        (StartFrom::Image(image), _) => format!("image `{image}`"),
        (StartFrom::Snapshot(_), Some(repository)) => format!("the build of {}", repository.name),
        (StartFrom::Snapshot(id), None) => format!("snapshot {id}"),
    };
    let hint = match (start, repository) {
        (_, Some(Repository { name, image: Some(_), .. })) => format!(
            "{build_all}, `harvest repo set {name} --image {ALL_AGENTS}`, then `harvest repo build \
             {name}`"
        ),
        (StartFrom::Snapshot(_), None) => {
            "choose one of its agents with `-a`, or start without the snapshot".to_owned()
        }
        (_, repository) => {
            let setting = configured.map(|_| format!("set `image = \"{ALL_AGENTS}\"`"));
            let build = match (start, repository) {
                (StartFrom::Snapshot(_), Some(one)) => {
                    Some(format!("`harvest repo build {}`", one.name))
                }
                _ => None,
            };
            [Some(build_all), setting, build]
                .into_iter()
                .flatten()
                .collect::<Vec<_>>()
                .join(", then ")
        }
    };
    (what, hint)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn repository(image: Option<&str>) -> Repository {
        Repository {
            name: "acme/shop".parse().unwrap(),
            url: "https://h/acme/shop".into(),
            base: None,
            secret: None,
            image: image.map(str::to_owned),
            build: None,
            created_at: harvest_proto::Timestamp::from_millis(0),
        }
    }

    #[test]
    fn small_image_is_enough_for_claude() {
        assert_eq!(default_image(&AgentName::Claude, false), "claude");
        assert_eq!(default_image(&AgentName::Scripted, false), "claude");
        assert!(AgentName::BUILT_IN.iter().all(|agent| default_image(agent, true) == "agents"));
    }

    #[test]
    fn hint_changes_what_lacks_the_agent() {
        let (image, snapshot) =
            (StartFrom::Image("base".into()), StartFrom::Snapshot(SnapshotId::random()));
        let hint = |start, repository: Option<&Repository>, configured| {
            describe(start, repository, configured).1
        };
        let own = hint(&snapshot, Some(&repository(Some("base"))), None);
        assert!(own.contains("`harvest repo set acme/shop --image agents`"), "{own}");
        let built = hint(&snapshot, Some(&repository(None)), None);
        assert_eq!(built, "`harvest image build agents`, then `harvest repo build acme/shop`");
        let set = hint(&image, None, Some("base"));
        assert_eq!(set, "`harvest image build agents`, then set `image = \"agents\"`");
        assert!(hint(&snapshot, None, None).contains("`-a`"));
    }
}
