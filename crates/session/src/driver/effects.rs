//! Runs the effects of a decision. Frames are sent on the bridge at once, in the order decided; the
//! rest runs in tasks that report back.

use std::{sync::Arc, time::Duration};

use harvest_proto::{
    AgentName, EventBody, SandboxId, SessionId, SnapshotId,
    bridge::{Boot, BootStart, Checkout, ToSupervisor},
    event::{SnapshotKind, StartWay},
};
use harvest_store::{CheckoutRecord, Removal, Write};

use super::{
    Driver, TaskReport,
    freezer::{HAND_OVER, thaw_now},
    late_results::{remove_late_sandbox, remove_late_snapshot},
    writes,
};
use crate::{
    agent_launch::mcp_servers,
    bridge::{Bridge, BridgeError, PendingReply},
    checkout,
    context::Shared,
    decide::{Action, Input, SandboxState, StartFailure},
    error_chain::error_chain,
    memory_file,
    provider_retry::retry,
    repositories::{boot_start, owners_of},
    sandboxes::{
        Created, Durability, Found, MissingObject, SandboxError, SandboxSpec, StartFrom,
        StateVolume,
    },
    timeouts::{FREEZE_LEASE, millis},
    trees,
    wall_clock::now,
};

// The snapshot waits for the diff, which is optional.
const DIFF_LIMIT: Duration = Duration::from_secs(90);

impl Driver {
    pub(super) async fn run_effect(&mut self, action: Action) {
        if let Action::SendPrompt { .. } | Action::StopTurn { .. } | Action::Answer { .. } = action
        {
            self.thaw_if_frozen();
        }
        match action {
            Action::Find { sandbox } => self.find(sandbox),
            Action::Start { sandbox, epoch, from } => self.start(sandbox, epoch, from),
            Action::Connect { sandbox, epoch } => self.dial(sandbox, epoch),
            Action::Boot { start, resume } => self.boot(start, resume).await,
            Action::Prepare => self.prepare(),
            Action::SendPrompt { prompt, turn, number } => self.send(prompt, turn, number).await,
            Action::StopTurn { turn } => {
                self.post(|id| ToSupervisor::Stop { id, turn });
            }
            Action::Answer { request, prompt } => self.answer(request, prompt).await,
            Action::Capture { sandbox, snapshot } => self.capture(sandbox, snapshot),
            Action::StopAndSave { sandbox, snapshot, kind } => {
                self.stop_and_save(sandbox, snapshot, kind)
            }
            Action::StopAndDiscard { sandbox } => self.stop_and_discard(sandbox),
            Action::RemoveSnapshot { snapshot } => self.remove_snapshot(snapshot),
            Action::Review => self.review(),
            Action::Freeze { sandbox } => self.set_frozen(sandbox, Some(FREEZE_LEASE)),
            Action::HandOver { sandbox } => self.set_frozen(sandbox, Some(HAND_OVER)),
            Action::Thaw { sandbox } => self.set_frozen(sandbox, None),
            // Persisted actions are written already.
            _ => {}
        }
    }

    fn find(&self, sandbox: SandboxId) {
        let (shared, reports, epoch) =
            (Arc::clone(&self.shared), self.report_sender.clone(), self.state.epoch);
        self.shared.tasks.spawn(async move {
            let found = retry(|| shared.sandboxes.provider.find(&sandbox)).await;
            let report = match found {
                Found::Running => TaskReport::FoundRunning { epoch },
                Found::Dead { reason } => Input::SandboxEnded { epoch, reason }.into(),
                Found::Gone => Input::FoundGone { epoch }.into(),
            };
            let _ = reports.send(report);
        });
    }

    fn start(&mut self, sandbox: SandboxId, epoch: u64, from: Option<SnapshotId>) {
        self.disconnect();
        let (shared, reports) = (Arc::clone(&self.shared), self.report_sender.clone());
        let (session, agent) = (self.id().clone(), self.record.session.agent.clone());
        let primary = self.record.checkouts.first().cloned();
        self.shared.tasks.spawn(async move {
            let began = shared.clock.now();
            let (start, from) = match origin(&shared, primary.as_ref(), from, &agent).await {
                Ok(origin) => origin,
                Err(detail) => {
                    let failed =
                        Input::StartFailed { epoch, detail, cause: StartFailure::Permanent };
                    let _ = reports.send(failed.into());
                    return;
                }
            };
            let (origin_name, snapshot) = match &from {
                StartFrom::Image(name) => (name.clone(), None),
                StartFrom::Snapshot(snapshot) => (snapshot.to_string(), Some(snapshot.clone())),
            };
            let way = match start {
                BootStart::Restore => StartWay::Snapshot,
                BootStart::Image => StartWay::Build,
                BootStart::Fresh | BootStart::Build | BootStart::Rebuild => StartWay::Image,
            };
            let spec = SandboxSpec {
                state: primary.map(|primary| StateVolume::Repository(primary.repository)),
                ..SandboxSpec::of_session(sandbox.clone(), from, shared.sandboxes.resources)
            };
            let created = shared.sandboxes.provider.create(spec).await;
            let warning = match &snapshot {
                Some(snapshot) if created.is_ok() => {
                    torn_warning(&shared, &session, snapshot, start).await
                }
                _ => None,
            };
            let millis = millis(shared.clock.now().since(began));
            let report = match created {
                Ok(Created { warnings }) => {
                    let (sandbox, id) = (sandbox.clone(), sandbox.clone());
                    let from = origin_name;
                    let body = EventBody::SandboxStarted { sandbox, epoch, from, way, millis };
                    let started = writes::event(now(), None, body);
                    let missing =
                        Created::events(&warnings).map(|body| writes::event(now(), None, body));
                    let writes = [started].into_iter().chain(missing).chain(warning).collect();
                    TaskReport::Started { epoch, sandbox: id, start, writes }
                }
                Err(error) => {
                    let cause = match &error {
                        SandboxError::Missing(
                            MissingObject::Image(_) | MissingObject::Snapshot(_),
                        ) => StartFailure::Permanent,
                        SandboxError::NoSpace { .. } => StartFailure::NoSpace,
                        _ => StartFailure::Transient,
                    };
                    Input::StartFailed { epoch, detail: error_chain(&error), cause }.into()
                }
            };
            if reports.send(report).is_err() {
                remove_late_sandbox(&shared, &session, &sandbox).await;
            }
        });
    }

    /// Sends a request now, if there is a connection.
    pub(super) fn post(&self, make: impl FnOnce(u64) -> ToSupervisor) -> Option<PendingReply> {
        self.connection.as_ref()?.bridge.post(make).ok()
    }

    async fn boot(&mut self, start: BootStart, resume: bool) {
        let shared = Arc::clone(&self.shared);
        let mcp_servers =
            mcp_servers(shared.sandboxes.doors.as_ref(), &owners_of(&self.record)).await;
        let session = &self.record.session;
        let agent = match self.launch(resume, None) {
            Ok(launch) => Some(launch),
            Err(unknown) => {
                let (epoch, detail) = (self.state.epoch, unknown.to_string());
                let failed = Input::BootFailed { epoch, detail, permanent: true };
                let _ = self.report_sender.send(failed.into());
                return;
            }
        };
        let boot = Boot {
            session: session.id.clone(),
            epoch: self.state.epoch,
            start,
            author: Some(session.author.clone()),
            repositories: self.checkouts(),
            agent,
            mcp_servers,
            git_hosts: shared.sandboxes.doors.git_hosts(),
            env: self.record.env.clone(),
            hook_millis: None,
            standby: false,
        };
        let epoch = self.state.epoch;
        let Some(posted) = self.post(|id| ToSupervisor::Boot { id, boot: Box::new(boot) }) else {
            return;
        };
        let reports = self.report_sender.clone();
        self.spawn_attached(async move {
            if let Err(BridgeError::Fault(fault)) = posted.reply().await {
                let failed = Input::BootFailed { epoch, detail: fault.message, permanent: false };
                let _ = reports.send(failed.into());
            }
        });
    }

    /// The checkouts in `/workspace`.
    pub(super) fn checkouts(&self) -> Vec<Checkout> {
        // Only a fresh session clones: a fork's disk holds its checkouts already.
        let clones = self.state.turns == 0 && self.record.session.forked_from.is_none();
        let all = &self.record.session.repositories;
        let checkout = |of: &CheckoutRecord| {
            let known = all.iter().find(|known| known.name == of.repository);
            let url = known.map(|known| self.shared.repositories.current_url(&known.url));
            Checkout { url, ..checkout::bridge_checkout(&self.record, of, clones) }
        };
        self.record.checkouts.iter().map(checkout).collect()
    }

    fn prepare(&mut self) {
        let Some(link) = &self.connection else { return };
        let (bridge, reports, epoch) =
            (link.bridge.clone(), self.report_sender.clone(), self.state.epoch);
        let session = &self.record.session;
        let restored =
            matches!(&self.state.sandbox, SandboxState::Booting { start: BootStart::Restore, .. });
        // The disk of another session comes with that session's branches.
        let branch = (restored && self.state.turns == 0).then(|| session.branch.clone());
        // Base commits can only be read before the session's first turn, or in a fresh checkout,
        // which may be newer than the last one.
        let look = !restored || self.state.turns == 0;
        let mut checkouts = self.record.checkouts.clone();
        if !restored {
            checkouts.iter_mut().for_each(|checkout| checkout.base_commit = None);
        }
        let store = self.shared.store.clone();
        self.spawn_attached(async move {
            let memory = memory_file::provide(&store, &bridge, checkouts.first());
            let prepare = checkout::prepare(&bridge, &checkouts, branch.as_ref(), look);
            let report = match tokio::join!(prepare, memory).0 {
                Ok(writes) => TaskReport::Input(Input::Prepared { epoch }, writes),
                // The reconnect prepares again.
                Err(checkout::PrepareError::Bridge(BridgeError::Lost)) => return,
                Err(error) => {
                    let detail = error_chain(&error);
                    Input::BootFailed { epoch, detail, permanent: false }.into()
                }
            };
            let _ = reports.send(report);
        });
    }

    fn capture(&mut self, sandbox: SandboxId, snapshot: SnapshotId) {
        let (shared, reports) = (Arc::clone(&self.shared), self.report_sender.clone());
        let bridge = self.connection.as_ref().map(|link| link.bridge.clone());
        let session = self.id().clone();
        let (turn, began) = (self.state.saved_turn().cloned(), self.state.latest_snapshot.clone());
        let checkouts = self.record.checkouts.clone();
        self.shared.tasks.spawn(async move {
            // An earlier server may have died during a capture and left the sandbox frozen.
            let _ = tokio::time::timeout(shared.timeouts.save, thaw_now(&shared, &sandbox)).await;
            let captured_as = snapshot.clone();
            let mut writes = Vec::new();
            if let Some(bridge) = &bridge {
                let tree = async {
                    let Some(turn) = &turn else { return Vec::new() };
                    trees::turn_tree_writes(&shared, &session, bridge, turn, began.as_ref()).await
                };
                let tree = tokio::time::timeout(DIFF_LIMIT, tree);
                let (diff, tree) = tokio::join!(turn_diff(&checkouts, &session, bridge), tree);
                writes.extend(diff.map(Write::Diff));
                writes.extend(tree.unwrap_or_default());
            }
            let input = match shared.sandboxes.provider.snapshots() {
                None => Input::CaptureUnsupported { snapshot },
                Some(snapshots) => {
                    let capture =
                        || snapshots.capture(&sandbox, &snapshot, Some(SnapshotKind::Turn));
                    match save_with_retry(&shared, capture).await {
                        Ok(captured) => {
                            Input::Captured { snapshot, millis: captured.frozen_millis }
                        }
                        Err(detail) => Input::CaptureFailed { snapshot, detail },
                    }
                }
            };
            if reports.send(TaskReport::Input(input, writes)).is_err() {
                remove_late_snapshot(&shared, &session, &captured_as).await;
            }
        });
    }

    fn stop_and_save(&mut self, sandbox: SandboxId, snapshot: SnapshotId, kind: SnapshotKind) {
        self.disconnect();
        let (shared, reports, session) =
            (Arc::clone(&self.shared), self.report_sender.clone(), self.id().clone());
        self.shared.tasks.spawn(async move {
            let (began, saved_as) = (shared.clock.now(), snapshot.clone());
            let provider = &shared.sandboxes.provider;
            shared.sandboxes.meter.end(&sandbox).await;
            let save = || provider.snapshot_and_remove(&sandbox, &snapshot, kind);
            let input = match save_with_retry(&shared, save).await {
                Ok(()) => {
                    let millis = millis(shared.clock.now().since(began));
                    Input::StoppedAndSaved { snapshot, millis }
                }
                Err(detail) => {
                    let found = tokio::time::timeout(shared.timeouts.save, provider.find(&sandbox));
                    let found = found.await.ok().and_then(Result::ok);
                    Input::StopSaveFailed { snapshot, detail, found }
                }
            };
            let warning = torn_warning(&shared, &session, &saved_as, BootStart::Restore).await;
            let writes = warning.into_iter().collect();
            if reports.send(TaskReport::Input(input, writes)).is_err() {
                remove_late_snapshot(&shared, &session, &saved_as).await;
            }
        });
    }

    /// If the server dies here, the next one removes the snapshot as an orphan.
    fn remove_snapshot(&self, snapshot: SnapshotId) {
        let shared = Arc::clone(&self.shared);
        self.shared.tasks.spawn(async move {
            let removals = [Removal::Snapshot(snapshot)];
            if let Err(error) =
                shared.store.removal_add(shared.lease, removals.to_vec(), now()).await
            {
                tracing::warn!(%error, "an unused snapshot stays until the next start");
                return;
            }
            shared.removals.remove_now(&removals).await;
        });
    }

    /// The sandbox started after its start had timed out.
    pub(super) fn discard_late(&self, sandbox: SandboxId) {
        let shared = Arc::clone(&self.shared);
        self.shared
            .tasks
            .spawn(async move { retry(|| shared.sandboxes.provider.remove(&sandbox)).await });
    }

    fn stop_and_discard(&mut self, sandbox: SandboxId) {
        self.disconnect();
        let (shared, reports, epoch) =
            (Arc::clone(&self.shared), self.report_sender.clone(), self.state.epoch);
        self.shared.tasks.spawn(async move {
            shared.sandboxes.meter.end(&sandbox).await;
            retry(|| shared.sandboxes.provider.remove(&sandbox)).await;
            let _ = reports.send(Input::Discarded { epoch }.into());
        });
    }

    /// An archived session keeps only its latest and its pinned snapshots.
    pub(super) fn apply_retention(&self) {
        let (shared, session) = (Arc::clone(&self.shared), self.id().clone());
        self.shared.tasks.spawn(async move {
            if let Err(error) = shared.retention.enforce_for(&session).await {
                tracing::warn!(%session, error = error_chain(&error), "cannot remove old snapshots");
            }
        });
    }

    /// At most one review runs; a push meanwhile starts another one after it.
    pub(super) fn review(&mut self) {
        if self.record.checkouts.is_empty() {
            return;
        }
        if let Some(again) = &mut self.reviewing {
            *again = true;
            return;
        }
        self.reviewing = Some(false);
        let (shared, reports, session) =
            (Arc::clone(&self.shared), self.report_sender.clone(), self.id().clone());
        self.shared.tasks.spawn(async move {
            let results = shared.repositories.review(&session).await;
            let _ = reports.send(TaskReport::Reviewed(results));
        });
    }
}

/// The event that reports a snapshot of a disk that lost its last writes, unless it is stored
/// already.
async fn torn_warning(
    shared: &Shared,
    session: &SessionId,
    snapshot: &SnapshotId,
    start: BootStart,
) -> Option<Write> {
    let durability = shared.sandboxes.provider.snapshots()?.durability(snapshot).await;
    if !matches!(durability, Ok(Durability::Torn)) {
        return None;
    }
    let advice = match start {
        BootStart::Restore => "check the files of the last turn, or restore an earlier one",
        _ => "build the repository again with `harvest repo build`",
    };
    let message = format!(
        "the machine restarted before the last writes were on the disk; {snapshot} may lack some of \
         them: {advice}"
    );
    let warning = EventBody::Warning { message };
    // A warning that may be a repeated one is better than none.
    let known = shared.store.event_exists(session, None, &warning).await.unwrap_or(false);
    (!known).then(|| writes::event(now(), None, warning))
}

/// The result of a save, or why its outcome is unknown. A save is idempotent, and a busy host may
/// recover in a moment: a second attempt continues the first.
async fn save_with_retry<T, F>(shared: &Shared, save: impl Fn() -> F) -> Result<T, String>
where
    F: Future<Output = Result<T, SandboxError>>,
{
    let limit = shared.timeouts.save;
    let attempt = async || match tokio::time::timeout(limit, save()).await {
        Ok(saved) => saved.map_err(|error| error_chain(&error)),
        Err(_) => Err(format!("no answer after {} s", limit.as_secs())),
    };
    match attempt().await {
        Ok(saved) => Ok(saved),
        Err(_) => attempt().await,
    }
}

/// The image or snapshot a sandbox starts from, and what its disk holds then.
async fn origin(
    shared: &Shared,
    primary: Option<&CheckoutRecord>,
    from: Option<SnapshotId>,
    agent: &AgentName,
) -> Result<(BootStart, StartFrom), String> {
    shared.sandboxes.agents.upstream_of(agent, None).map_err(|unknown| unknown.to_string())?;
    if let Some(snapshot) = from {
        return Ok((BootStart::Restore, StartFrom::Snapshot(snapshot)));
    }
    let repository = match primary {
        Some(checkout) => {
            let known = shared.store.repository_get(&checkout.repository).await;
            let known = known.map_err(|error| error_chain(&error))?;
            let known = shared.repositories.on_branch(known, checkout.base.as_ref()).await;
            Some(known.map_err(|error| error_chain(&error))?)
        }
        None => None,
    };
    let from = shared.repositories.origin(repository.as_ref(), agent).await;
    let from = from.map_err(|error| error_chain(&error))?;
    Ok((boot_start(&from), from))
}

async fn turn_diff(
    checkouts: &[CheckoutRecord],
    session: &SessionId,
    bridge: &Bridge,
) -> Option<String> {
    match tokio::time::timeout(DIFF_LIMIT, checkout::diff(bridge, checkouts)).await {
        Ok(Ok(diff)) => Some(diff),
        Ok(Err(error)) => {
            tracing::debug!(%session, error = error_chain(&error), "cannot read the turn's diff");
            None
        }
        Err(_) => None,
    }
}
