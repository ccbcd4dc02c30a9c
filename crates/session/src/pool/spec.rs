//! What a sandbox of the pool is started with. A session takes only one that was started with what
//! the session itself would be started with.

use std::collections::BTreeMap;

use harvest_proto::{
    AgentName, BranchName, RepositoryName, SecretOwner, SessionId, SnapshotId,
    api::{Repository, SandboxLimits},
    bridge::{AgentLaunch, Boot, BootStart, Checkout},
};
use harvest_store::{AgentChoice, PoolMember};
use serde::{Deserialize, Serialize};

use crate::{
    agent_launch::{agent_launch, mcp_servers},
    git_remote::remote,
    sandbox_context::SandboxContext,
    sandboxes::{SandboxSpec, StartFrom, StateVolume},
};

/// The number of a session's first sandbox.
pub(super) const EPOCH: u64 = 1;

/// What a sandbox of the pool is started with, except for what differs between any two.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct MemberSpec {
    pub(super) repository: RepositoryName,
    base: Option<BranchName>,
    /// The repository's build.
    snapshot: SnapshotId,
    /// Without a conversation.
    agent: AgentLaunch,
    git_hosts: Vec<String>,
    limits: SandboxLimits,
    /// The program that is pid 1.
    program: String,
}

impl MemberSpec {
    /// `None` when sandboxes for this repository and agent cannot be started ahead: it has no
    /// build, or the agent uses MCP servers that need the session's keys when it starts.
    pub(super) async fn of(
        context: &SandboxContext,
        program: &str,
        repository: &Repository,
        choice: &AgentChoice,
        owners: &[SecretOwner],
    ) -> Option<Self> {
        let build = repository.build.as_ref()?;
        let agent = agent_launch(context, choice, String::new(), false).ok()?;
        if !mcp_servers(context.doors.as_ref(), owners).await.is_empty() {
            return None;
        }
        Some(Self {
            repository: repository.name.clone(),
            base: repository.base.clone(),
            snapshot: build.snapshot_id.clone(),
            agent,
            git_hosts: context.doors.git_hosts(),
            limits: context.resources,
            program: program.to_owned(),
        })
    }

    /// As it is stored and compared.
    pub(super) fn to_text(&self) -> String {
        serde_json::to_string(self).expect("a specification holds only maps with text keys")
    }

    pub(super) fn from_text(text: &str) -> Option<Self> {
        serde_json::from_str(text).ok()
    }

    pub(super) fn snapshot(&self) -> StartFrom {
        StartFrom::Snapshot(self.snapshot.clone())
    }

    pub(super) fn agent_name(&self) -> AgentName {
        self.agent.name.clone()
    }

    pub(super) fn source_name(&self) -> String {
        self.snapshot.to_string()
    }

    pub(super) fn sandbox(&self, member: &PoolMember) -> SandboxSpec {
        SandboxSpec {
            state: Some(StateVolume::Repository(self.repository.clone())),
            ..SandboxSpec::of_session(member.sandbox.clone(), self.snapshot(), self.limits)
        }
    }

    /// The order to stand by: it names no author, no variable and no secret.
    pub(super) fn boot(&self, member: &PoolMember) -> Boot {
        let agent = AgentLaunch { conversation: member.conversation.clone(), ..self.agent.clone() };
        Boot {
            session: member.session.clone(),
            epoch: EPOCH,
            start: BootStart::Image,
            author: None,
            repositories: vec![Checkout {
                name: self.repository.clone(),
                folder: self.repository.folder(),
                remote: remote(&self.repository),
                // The order of its session comes before anything is fetched.
                url: None,
                base: self.base.clone(),
                branch: Some(branch(&member.session)),
                clone_missing: true,
            }],
            agent: Some(agent),
            mcp_servers: Vec::new(),
            git_hosts: self.git_hosts.clone(),
            env: BTreeMap::new(),
            hook_millis: None,
            standby: true,
        }
    }
}

/// The branch of a session from the pool. It has no title yet when the agent looks at its branch.
pub(crate) fn branch(session: &SessionId) -> BranchName {
    let name = format!("harvest/{}", session.part());
    name.parse().expect("ids have only letters and digits")
}
