//! One sandbox of the pool, from its start until a session takes it: its agent starts, then the
//! sandbox is frozen and kept frozen. One task per sandbox; it is stopped before the sandbox ends
//! or is taken.

use std::{sync::Arc, time::Duration};

use harvest_proto::{
    AgentName, EventBody,
    bridge::{BridgeRole, OutboxEvent, ToSupervisor},
    event::{BootPhase, PhaseStatus},
};
use harvest_store::{ComputeOwner, PoolMember, StoreError};
use tokio::{
    sync::{mpsc, watch},
    task::JoinHandle,
};
use tokio_util::sync::CancellationToken;

use super::{
    Pool,
    spec::{EPOCH, MemberSpec},
    standby_door::StandbyDoor,
};
use crate::{
    bridge::{Bridge, BridgeError, OpenedBridge, OwnerMessage},
    error_chain::error_chain,
    sandbox_context::SandboxContext,
    sandboxes::SandboxError,
    timeouts::{FREEZE_LEASE, FREEZE_RENEWAL},
};

// An agent starts in seconds; minutes on an overloaded machine, which needs no further sandbox.
const READY_TIMEOUT: Duration = Duration::from_secs(5 * 60);

// For the agent to read the list of tools before its door closes.
const ANSWER_TIME: Duration = Duration::from_millis(500);

/// Where a sandbox of the pool is on its way.
#[derive(Debug, Clone)]
pub(super) enum MemberState {
    Starting,
    /// A session can take it.
    Ready {
        /// The events of its boot, which become the session's.
        events: Arc<[OutboxEvent]>,
        /// What the sandbox started without.
        warnings: Arc<[String]>,
    },
    /// It never becomes ready, or has died. It waits for its end.
    Failed,
}

/// The task of a sandbox in the pool.
pub(super) struct MemberTask {
    pub(super) state: watch::Receiver<MemberState>,
    stop: CancellationToken,
    task: JoinHandle<Option<()>>,
}

/// Why a sandbox of the pool failed.
#[derive(Debug, thiserror::Error)]
enum MemberError {
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
    #[error(transparent)]
    Bridge(#[from] BridgeError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("{0}")]
    Boot(String),
    #[error("it was not ready within {} s", .limit.as_secs())]
    TimedOut { limit: Duration },
    #[error("it ended: {reason}")]
    Ended { reason: String },
}

impl MemberTask {
    /// Starts the task of a member: of a new one, whose row is stored, or of one that an earlier
    /// server left.
    pub(super) fn spawn(pool: &Arc<Pool>, member: PoolMember, spec: MemberSpec) -> Self {
        let (states, state) = watch::channel(MemberState::Starting);
        let stop = CancellationToken::new();
        let work = Work { pool: Arc::clone(pool), member, spec, states, stop: stop.clone() };
        let task = pool.context.tasks.spawn(work.run());
        Self { state, stop, task }
    }

    /// Stops the task. The sandbox stays as it is, and nothing freezes it any more.
    pub(super) async fn stop(self) {
        self.stop.cancel();
        let _cancelled_at_shutdown = self.task.await;
    }
}

struct Work {
    pool: Arc<Pool>,
    member: PoolMember,
    spec: MemberSpec,
    states: watch::Sender<MemberState>,
    stop: CancellationToken,
}

impl Work {
    async fn run(self) {
        let Err(error) = self.live().await else { return };
        let (sandbox, repository) = (&self.member.sandbox, &self.member.repository);
        let error = error_chain(&error);
        tracing::warn!(%sandbox, %repository, error, "a sandbox of the warm pool failed");
        self.states.send_replace(MemberState::Failed);
        self.pool.on_change(&self.spec, true);
    }

    /// Returns when the task is stopped.
    async fn live(&self) -> Result<(), MemberError> {
        let PoolMember { session, sandbox, repository, .. } = &self.member;
        let SandboxContext { provider, meter, .. } = &*self.pool.context;
        let mut warnings = self.member.warnings.clone();
        if !self.member.ready {
            // Not cancelled: half a start could leave a sandbox behind its removal.
            warnings = provider.create(self.spec.sandbox(&self.member)).await?.warnings;
        }
        // No session has asked for what it uses until one takes it.
        let owner =
            ComputeOwner { repository: Some(repository.clone()), ..ComputeOwner::default() };
        meter.begin(sandbox.clone(), owner);
        let limit = READY_TIMEOUT.min(self.pool.context.timeouts.boot);
        let prepared = tokio::time::timeout(limit, self.prepare());
        let Some(prepared) = self.stop.run_until_cancelled(prepared).await else { return Ok(()) };
        let events = prepared.map_err(|_| MemberError::TimedOut { limit })??;
        self.freeze().await;
        // The sandbox idles from here on; the session that takes it is charged from then on.
        meter.read_one(sandbox).await?;
        if !self.pool.store.pool_ready(self.pool.lease, session, &warnings).await? {
            return Ok(());
        }
        let (events, warnings) = (events.into(), warnings.into());
        self.states.send_replace(MemberState::Ready { events, warnings });
        self.pool.on_change(&self.spec, false);
        loop {
            tokio::select! {
                () = self.stop.cancelled() => return Ok(()),
                reason = provider.wait(sandbox) => {
                    return Err(MemberError::Ended { reason: reason? });
                }
                () = tokio::time::sleep(FREEZE_RENEWAL) => {}
            }
            self.freeze().await;
        }
    }

    /// Boots the sandbox until its agent has started; returns the events of that, which are not
    /// acknowledged: the supervisor keeps them for the session.
    async fn prepare(&self) -> Result<Vec<OutboxEvent>, MemberError> {
        let (context, member) = (&self.pool.context, &self.member);
        let door = StandbyDoor::open(context, &member.sandbox, self.pool.tools).await?;
        let stream = context.provider.connect(&member.sandbox).await?;
        let role = BridgeRole::Owner { lease: self.pool.lease.0, epoch: EPOCH, stored: 0 };
        let opened = Bridge::open(stream, role, Some(context.timeouts.liveness())).await?;
        let OpenedBridge { bridge, mut events, .. } = opened;
        let boot = Box::new(self.spec.boot(member));
        bridge.request(|id| ToSupervisor::Boot { id, boot }).await?;
        let mut booted = wait_for_agent(&mut events).await?;
        if !member.ready && self.spec.agent_name() != AgentName::Scripted {
            let listed = door.listed.notified();
            // An agent that was told of no tools never lists them.
            if tokio::time::timeout(self.pool.config.settle, listed).await.is_ok() {
                tokio::time::sleep(ANSWER_TIME).await;
            }
        }
        while let Ok(message) = events.try_recv() {
            booted.extend(event(message));
        }
        Ok(booted)
    }

    /// Freezes the sandbox, or renews that. Without it the sandbox is as ready, but not as idle.
    async fn freeze(&self) {
        if let Some(control) = self.pool.context.provider.freeze_control()
            && let Err(error) = control.freeze(&self.member.sandbox, FREEZE_LEASE).await
        {
            let (sandbox, error) = (&self.member.sandbox, error_chain(&error));
            tracing::debug!(%sandbox, error, "cannot freeze a sandbox of the warm pool");
        }
    }
}

async fn wait_for_agent(
    events: &mut mpsc::Receiver<OwnerMessage>,
) -> Result<Vec<OutboxEvent>, MemberError> {
    let mut booted = Vec::new();
    while let Some(message) = events.recv().await {
        let Some(event) = event(message) else { continue };
        let (failure, has_agent) = match &event.body {
            EventBody::BootPhase { failure: Some(failure), .. } => {
                (Some(failure.message.clone()), false)
            }
            EventBody::BootPhase { phase, status: PhaseStatus::Done, .. } => {
                (None, *phase == BootPhase::Agent)
            }
            _ => (None, false),
        };
        if let Some(message) = failure {
            return Err(MemberError::Boot(message));
        }
        booted.push(event);
        if has_agent {
            return Ok(booted);
        }
    }
    Err(BridgeError::Lost.into())
}

fn event(message: OwnerMessage) -> Option<OutboxEvent> {
    match message {
        OwnerMessage::Event(event) => Some(*event),
        OwnerMessage::Heartbeat { .. } => None,
    }
}
