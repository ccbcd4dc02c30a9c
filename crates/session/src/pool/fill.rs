//! Fills the pool and ends what is outdated. New sandboxes start one after the other, when no
//! session waits and some time after the last one was created.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use harvest_proto::{
    RepositoryName, SandboxId, SecretOwner, SessionId, Timestamp,
    api::{Repository, WarmRepository},
};
use harvest_store::{AgentChoice, PoolMember};
use tokio::time::Instant;

use super::{
    MemberSpec, Pool, Reservation,
    member::MemberState,
    memory::{HostMemory, MEMBER_BYTES},
    plan::{Known, plan},
};
use crate::{error::SessionError, jobs::Job, uuid::uuid, wall_clock::now};

const PERIOD: Duration = Duration::from_secs(60);

const DAY_MILLIS: i64 = 24 * 60 * 60 * 1000;

// After a failure with the same specification.
const RETRY_AFTER: Duration = Duration::from_secs(10 * 60);

// A person types a prompt in less.
const RESERVATION: Duration = Duration::from_secs(5 * 60);

impl Pool {
    /// Starts the jobs that fill the pool and give up its slots.
    pub(crate) fn spawn(self: &Arc<Self>) {
        let tasks = &self.context.tasks;
        let job = Job { name: "pool", period: Some(PERIOD), wake: Arc::clone(&self.wake) };
        let pool = Arc::clone(self);
        job.spawn(tasks, move || {
            let pool = Arc::clone(&pool);
            async move { Ok(pool.fill().await?) }
        });
        let wake = Arc::clone(&self.context.admission.pool_ending);
        let job = Job { name: "pool slots", period: None, wake };
        let pool = Arc::clone(self);
        job.spawn(tasks, move || {
            let pool = Arc::clone(&pool);
            async move {
                for session in pool.context.admission.pool_to_end() {
                    pool.end(&session).await;
                }
                Ok(())
            }
        });
    }

    /// Brings the pool one look closer to what is wanted.
    async fn fill(self: &Arc<Self>) -> Result<(), SessionError> {
        let wanted = self.wanted().await?;
        let memory = HostMemory::read(&self.config.meminfo);
        let is_short = memory.is_some_and(HostMemory::is_short);
        let counts = wanted.keys().map(|spec| (spec.clone(), self.config.per_repository)).collect();
        let plan = plan(self.known(), &counts, day_ago(), is_short);
        for session in &plan.end {
            self.end(session).await;
        }
        for text in plan.start {
            // One after the other: the end of a start wakes the job.
            if self.counts().starting > 0 {
                break;
            }
            self.wait_for_sessions().await;
            let Some(spec) = wanted.get(&text).filter(|_| !self.failed_lately(&text)) else {
                continue;
            };
            if !self.has_room().await || self.start(spec.clone(), None).await?.is_none() {
                break;
            }
        }
        Ok(())
    }

    /// What the members should be started with: as the newest session of each repository that was
    /// used in the last day.
    async fn wanted(&self) -> Result<BTreeMap<String, MemberSpec>, SessionError> {
        let mut wanted = BTreeMap::new();
        if self.config.per_repository == 0 {
            return Ok(wanted);
        }
        let choices = self.choices().await?;
        if choices.is_empty() {
            return Ok(wanted);
        }
        for repository in self.repositories.list().await? {
            let Some(choice) = choices.get(&repository.name) else { continue };
            if let Some(spec) = self.spec(&repository, choice).await
                && self.context.provider.can_start_from(&spec.snapshot()).await?
            {
                wanted.insert(spec.to_text(), spec);
            }
        }
        Ok(wanted)
    }

    /// The agent of the newest session of each repository that was used in the last day.
    async fn choices(&self) -> Result<BTreeMap<RepositoryName, AgentChoice>, SessionError> {
        Ok(self.store.pool_choices(day_ago()).await?)
    }

    /// The specification for a session of any user.
    async fn spec(&self, repository: &Repository, choice: &AgentChoice) -> Option<MemberSpec> {
        let owners = [SecretOwner::Repository(repository.name.clone()), SecretOwner::Global];
        MemberSpec::of(&self.context, &self.config.program, repository, choice, &owners).await
    }

    fn known(&self) -> Vec<Known> {
        let state = self.state();
        let known = |entry: &super::Entry| Known {
            session: entry.member.session.clone(),
            spec: entry.member.spec.clone(),
            created_at: entry.member.created_at,
            failed: matches!(*entry.task.state.borrow(), MemberState::Failed),
            reserved: entry.reserved_by().is_some(),
        };
        state.members.values().map(known).collect()
    }

    /// Leaves the machine to a session that has just been created, for a while.
    async fn wait_for_sessions(&self) {
        let until = self.state().created_at.map(|at| at + self.config.refill_delay);
        if let Some(until) = until {
            tokio::time::sleep_until(until).await;
        }
    }

    fn failed_lately(&self, spec: &str) -> bool {
        let now = self.clock.now();
        let mut state = self.state();
        state.failed.retain(|_, at| now.since(*at) < RETRY_AFTER);
        state.failed.contains_key(spec)
    }

    async fn has_room(&self) -> bool {
        let Some(memory) = HostMemory::read(&self.config.meminfo) else { return true };
        let sandboxes: Vec<SandboxId> =
            self.state().members.values().map(|entry| entry.member.sandbox.clone()).collect();
        let mut used = 0u64;
        for sandbox in sandboxes {
            let usage = self.context.provider.usage(&sandbox).await.ok().flatten();
            used = used.saturating_add(usage.map_or(MEMBER_BYTES, |usage| usage.memory_bytes));
        }
        memory.has_room(used)
    }

    /// Starts a member; `None` without a free slot.
    async fn start(
        self: &Arc<Self>,
        spec: MemberSpec,
        reserved: Option<Reservation>,
    ) -> Result<Option<SessionId>, SessionError> {
        let member = PoolMember {
            session: SessionId::random(),
            sandbox: SandboxId::random(),
            repository: spec.repository.clone(),
            conversation: uuid(),
            spec: spec.to_text(),
            ready: false,
            warnings: Vec::new(),
            created_at: now(),
        };
        let session = member.session.clone();
        if !self.context.admission.pool_claim(&session) {
            return Ok(None);
        }
        if let Err(error) = self.store.pool_insert(self.lease, &member).await {
            self.context.admission.pool_release(&session);
            return Err(error.into());
        }
        self.state().started += 1;
        self.insert(member, spec, reserved);
        Ok(Some(session))
    }

    /// Reserves a sandbox for the next session of this user on a repository; starts one if none
    /// waits.
    ///
    /// # Errors
    /// When the repository has no build, or no further sandbox may run.
    pub(crate) async fn warm(
        self: &Arc<Self>,
        warm: WarmRepository,
        user: &str,
    ) -> Result<SandboxId, SessionError> {
        let WarmRepository { repository, agent, model } = warm;
        let name = self.repositories.resolve(&repository).await?;
        let repository = self.repositories.get(&name).await?;
        let last = match (&agent, &model) {
            (None, None) => self.choices().await?.remove(&repository.name),
            _ => None,
        };
        let choice = last.unwrap_or_else(|| AgentChoice {
            agent: agent.unwrap_or_default(),
            model,
            effort: None,
            no_questions: false,
        });
        self.repositories.check_agent(&choice.agent, Some(&repository), None).await?;
        let Some(spec) = self.spec(&repository, &choice).await else {
            return Err(cannot_warm(&repository));
        };
        let reservation =
            Reservation { user: user.to_ascii_lowercase(), until: Instant::now() + RESERVATION };
        if let Some(sandbox) = self.reserve(&spec.to_text(), &reservation) {
            return Ok(sandbox);
        }
        if !self.has_room().await {
            let what = "too little memory is free to start a sandbox ahead";
            return Err(SessionError::conflict("no_memory", what, "create the session instead"));
        }
        let Some(session) = self.start(spec, Some(reservation)).await? else {
            let what = "no slot is free for a sandbox that is started ahead";
            let hint = "create the session: it waits for a slot";
            return Err(SessionError::conflict("no_slot", what, hint));
        };
        let state = self.state();
        let started = state.members.get(&session).map(|entry| entry.member.sandbox.clone());
        started.ok_or(SessionError::Stopped)
    }

    /// Reserves a member that waits or starts: one that this user has reserved, or a free one.
    fn reserve(&self, spec: &str, reservation: &Reservation) -> Option<SandboxId> {
        let mut state = self.state();
        let usable = |entry: &&mut super::Entry| {
            entry.member.spec == spec && (entry.is_ready() || entry.is_starting())
        };
        let of = |entry: &&mut super::Entry| match entry.reserved_by() {
            Some(user) if user == reservation.user => 0,
            Some(_) => 3,
            None if entry.is_ready() => 1,
            None => 2,
        };
        let best = state.members.values_mut().filter(usable).min_by_key(|entry| of(entry))?;
        if of(&best) == 3 {
            return None;
        }
        best.reserved = Some(reservation.clone());
        Some(best.member.sandbox.clone())
    }
}

fn day_ago() -> Timestamp {
    Timestamp::from_millis(now().as_millis().saturating_sub(DAY_MILLIS))
}

fn cannot_warm(repository: &Repository) -> SessionError {
    let name = &repository.name;
    match repository.build {
        None => SessionError::conflict(
            "no_build",
            format!("{name} has no build to start from"),
            format!("`harvest repo build {name}` builds it; or create the session"),
        ),
        Some(_) => SessionError::conflict(
            "not_warmed",
            format!("the MCP servers of {name} need the session's keys when its agent starts"),
            "create the session instead",
        ),
    }
}
