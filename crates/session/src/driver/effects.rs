//! What of a step is carried out. Frames go onto the wire here and now, in the order decided; the
//! rest runs beside the driver and reports back.

use std::{sync::Arc, time::Duration};

use harvest_proto::{
    EventBody, PromptId, SandboxId, SnapshotId, TurnId,
    bridge::{AgentLaunch, Boot, BootStart, Checkout, PromptOrder, Restarts, ToSupervisor},
    event::SnapshotKind,
};
use harvest_store::{CheckoutRecord, Removal, StoreError, Write};

use super::{
    Driver, Note,
    freezer::go_on,
    writes::{self, is_kept},
};
use crate::{
    bridge::{Bridge, BridgeError, Posted},
    checkout,
    decide::{Action, Input, Machine},
    evidence,
    provider::{Found, ProviderError, StartFrom, StartOrder},
    removals::carry_out,
    retention::keep_to_rules,
    trees,
    wiring::{Shared, now, remote, words},
};

// A diff is nice to have; the snapshot that waits for it is not.
const DIFF_LIMIT: Duration = Duration::from_secs(90);

impl Driver {
    pub(super) async fn act(&mut self, action: Action) {
        if is_kept(&action) {
            return;
        }
        if let Action::Send { .. } | Action::StopTurn { .. } | Action::Answer { .. } = action {
            self.rouse();
        }
        match action {
            Action::Find { sandbox } => self.find(sandbox),
            Action::Start { sandbox, epoch, from } => self.start(sandbox, epoch, from),
            Action::Connect { sandbox, epoch } => self.dial(sandbox, epoch),
            Action::Boot { start, resume } => self.boot(start, resume),
            Action::Prepare => self.prepare(),
            Action::Send { prompt, turn, number } => self.send(prompt, turn, number).await,
            Action::StopTurn { turn } => {
                self.post(|id| ToSupervisor::Stop { id, turn });
            }
            Action::Answer { request, prompt } => self.answer(request, prompt).await,
            Action::Capture { sandbox, snapshot } => self.capture(sandbox, snapshot),
            Action::EndKept { sandbox, snapshot, kind } => self.end_kept(sandbox, snapshot, kind),
            Action::End { sandbox } => self.end(sandbox),
            Action::Forget { snapshot } => self.forget(snapshot),
            Action::Review => self.review(),
            Action::Freeze { sandbox } => self.wish_still(sandbox, true),
            Action::Thaw { sandbox } => self.wish_still(sandbox, false),
            _ => {}
        }
    }

    fn find(&self, sandbox: SandboxId) {
        let (shared, notes, epoch) =
            (Arc::clone(&self.shared), self.notes_in.clone(), self.state.epoch);
        self.shared.spawn(async move {
            let found = retry(|| shared.provider.find(&sandbox)).await;
            let note = match found {
                Found::Running(started) => Note::FoundRunning { epoch, started },
                Found::Dead { reason } => {
                    Note::Input(Input::SandboxEnded { epoch, reason }, Vec::new())
                }
                Found::Gone => Note::Input(Input::FoundGone { epoch }, Vec::new()),
            };
            let _ = notes.send(note);
        });
    }

    fn start(&mut self, sandbox: SandboxId, epoch: u64, from: Option<SnapshotId>) {
        self.detach();
        let (shared, notes) = (Arc::clone(&self.shared), self.notes_in.clone());
        let session = self.id().clone();
        let primary = self.record.checkouts.first().map(|first| first.repository.clone());
        self.shared.spawn(async move {
            let began = shared.steady.now();
            let (start, from) = match origin(&shared, primary.as_deref(), from).await {
                Ok(origin) => origin,
                Err(detail) => {
                    let failed = Input::StartFailed { epoch, detail, permanent: true };
                    let _ = notes.send(Note::Input(failed, Vec::new()));
                    return;
                }
            };
            let words_of = match &from {
                StartFrom::Image(name) => name.clone(),
                StartFrom::Snapshot(snapshot) => snapshot.to_string(),
            };
            let order = StartOrder { sandbox: sandbox.clone(), from, state: primary };
            let started = shared.provider.start(order).await;
            let millis =
                u64::try_from(shared.steady.now().since(began).as_millis()).unwrap_or(u64::MAX);
            let note = match started {
                Ok(started) => {
                    let (sandbox, id) = (sandbox.clone(), sandbox.clone());
                    let body = EventBody::SandboxStarted { sandbox, epoch, from: words_of, millis };
                    let writes = vec![writes::event(now(), None, body)];
                    Note::Started { epoch, sandbox: id, start, started, writes }
                }
                Err(error) => {
                    let permanent = matches!(
                        error,
                        ProviderError::ImageMissing { .. } | ProviderError::SnapshotMissing { .. }
                    );
                    Note::Input(
                        Input::StartFailed { epoch, detail: words(&error), permanent },
                        Vec::new(),
                    )
                }
            };
            if notes.send(note).is_err() {
                end_if_deleted(&shared, &session, &sandbox).await;
            }
        });
    }

    /// Puts a request on the wire now, if there is one.
    fn post(&self, make: impl FnOnce(u64) -> ToSupervisor) -> Option<Posted> {
        self.link.as_ref()?.bridge.post(make).ok()
    }

    fn boot(&mut self, start: BootStart, resume: bool) {
        let session = &self.record.session;
        let boot = Boot {
            session: session.id.clone(),
            epoch: self.state.epoch,
            start,
            repositories: self.checkouts(),
            agent: Some(AgentLaunch {
                name: session.agent.clone(),
                conversation: self.record.conversation.clone(),
                resume,
                // The scripted stand-in is the gateway's, not a model the agent knows.
                model: session.model.clone().filter(|model| model != "scripted"),
                restarts: Restarts::default(),
            }),
            env: self.record.env.clone(),
            hook_millis: None,
        };
        let epoch = self.state.epoch;
        let Some(posted) = self.post(|id| ToSupervisor::Boot { id, boot: Box::new(boot) }) else {
            return;
        };
        let notes = self.notes_in.clone();
        self.attach(async move {
            if let Err(BridgeError::Fault(fault)) = posted.reply().await {
                let failed = Input::BootFailed { epoch, detail: fault.message };
                let _ = notes.send(Note::Input(failed, Vec::new()));
            }
        });
    }

    /// What the sandbox is to have in `/workspace`.
    fn checkouts(&self) -> Vec<Checkout> {
        let session = &self.record.session;
        let checkout = |of: &CheckoutRecord| Checkout {
            name: of.repository.clone(),
            remote: remote(&of.repository),
            base: of.base.clone(),
            branch: Some(session.branch.clone()),
            // Before its first turn a disk holds nothing of the session's; a fork's holds all there is to have.
            clone_missing: self.state.turns == 0 && session.forked_from.is_none(),
        };
        self.record.checkouts.iter().map(checkout).collect()
    }

    fn prepare(&mut self) {
        let Some(link) = &self.link else { return };
        let (bridge, notes, epoch) = (link.bridge.clone(), self.notes_in.clone(), self.state.epoch);
        let session = &self.record.session;
        let restored =
            matches!(&self.state.machine, Machine::Booting { start: BootStart::Restore, .. });
        // A disk from elsewhere comes with the branches it had there.
        let branch = (restored && self.state.turns == 0).then(|| session.branch.clone());
        // Only a disk that holds nothing of the session yet shows what it starts from.
        let look = !restored || self.state.turns == 0;
        let checkouts = self.record.checkouts.clone();
        self.attach(async move {
            let note = match checkout::prepare(&bridge, &checkouts, branch.as_deref(), look).await {
                Ok(writes) => Note::Input(Input::Prepared { epoch }, writes),
                // The connection comes back, and with it the order to prepare.
                Err(checkout::PrepareError::Bridge(BridgeError::Lost)) => return,
                Err(error) => {
                    Note::Input(Input::BootFailed { epoch, detail: words(&error) }, Vec::new())
                }
            };
            let _ = notes.send(note);
        });
    }

    async fn send(&mut self, prompt: PromptId, turn: TurnId, number: u32) {
        let Ok(row) = self.shared.store.prompt_get(self.id(), &prompt).await else { return };
        let order = PromptOrder {
            prompt: prompt.clone(),
            turn,
            number,
            text: row.text,
            author: row.author,
        };
        let posted = self.post(|id| ToSupervisor::Prompt { id, prompt: Box::new(order) });
        let Some(posted) = posted else { return };
        let notes = self.notes_in.clone();
        self.attach(async move {
            let input = match posted.reply().await {
                Ok(_) => Input::Accepted { prompt },
                Err(BridgeError::Fault(fault)) => Input::Refused { prompt, detail: fault.message },
                // Whether it arrived is asked when the connection is back.
                Err(_) => return,
            };
            let _ = notes.send(Note::Input(input, Vec::new()));
        });
    }

    async fn answer(&mut self, request: String, prompt: PromptId) {
        let Ok(row) = self.shared.store.prompt_get(self.id(), &prompt).await else { return };
        self.post(|id| ToSupervisor::Answer { id, request, answer: row.text });
    }

    fn capture(&mut self, sandbox: SandboxId, snapshot: SnapshotId) {
        let (shared, notes) = (Arc::clone(&self.shared), self.notes_in.clone());
        let bridge = self.link.as_ref().map(|link| link.bridge.clone());
        let session = self.id().clone();
        let (turn, began) = (self.state.saved_turn().cloned(), self.state.disk.clone());
        self.shared.spawn(async move {
            // An earlier server may have died while it kept the disk.
            let _ = tokio::time::timeout(shared.config.clocks.save, go_on(&shared, &sandbox)).await;
            let kept = snapshot.clone();
            let mut writes = Vec::new();
            if let Some(bridge) = &bridge {
                let tree = async {
                    let turn = turn.as_ref()?;
                    Some(trees::of_turn(&shared, &session, bridge, turn, began.as_ref()).await)
                };
                let tree = tokio::time::timeout(DIFF_LIMIT, tree);
                let (diff, tree) = tokio::join!(turn_diff(&shared, &session, bridge), tree);
                writes.extend(diff.map(Write::Diff));
                writes.extend(tree.ok().flatten().unwrap_or_default());
            }
            let input = match shared.provider.snapshots() {
                None => Input::CannotSave { snapshot },
                Some(snapshots) => {
                    let capture = || {
                        in_time(&shared, snapshots.capture(&sandbox, &snapshot, SnapshotKind::Turn))
                    };
                    let mut captured = capture().await;
                    if captured.is_err() {
                        // It is idempotent, and a busy machine may be less so a moment later.
                        captured = capture().await;
                    }
                    match captured {
                        Ok(millis) => Input::Saved { snapshot, millis },
                        Err(detail) => Input::SaveFailed { snapshot, detail },
                    }
                }
            };
            if notes.send(Note::Input(input, writes)).is_err() {
                remove_if_deleted(&shared, &session, &kept).await;
            }
        });
    }

    fn end_kept(&mut self, sandbox: SandboxId, snapshot: SnapshotId, kind: SnapshotKind) {
        self.detach();
        let (shared, notes, session) =
            (Arc::clone(&self.shared), self.notes_in.clone(), self.id().clone());
        self.shared.spawn(async move {
            let (began, kept_as) = (shared.steady.now(), snapshot.clone());
            let keep = || in_time(&shared, shared.provider.end_kept(&sandbox, &snapshot, kind));
            let mut kept = keep().await;
            if kept.is_err() {
                // It is idempotent: what the first attempt did counts for the second.
                kept = keep().await;
            }
            let input = match kept {
                Ok(()) => {
                    let millis = u64::try_from(shared.steady.now().since(began).as_millis())
                        .unwrap_or(u64::MAX);
                    Input::Kept { snapshot, millis }
                }
                Err(detail) => {
                    let gone = matches!(shared.provider.find(&sandbox).await, Ok(Found::Gone));
                    Input::KeepFailed { snapshot, detail, gone }
                }
            };
            if notes.send(Note::Input(input, Vec::new())).is_err() {
                remove_if_deleted(&shared, &session, &kept_as).await;
            }
        });
    }

    /// A server that dies here leaves it to the next, which knows of no use for it either.
    fn forget(&self, snapshot: SnapshotId) {
        let shared = Arc::clone(&self.shared);
        self.shared.spawn(async move {
            let removals = [Removal::Snapshot(snapshot)];
            if let Err(error) =
                shared.store.removal_add(shared.lease, removals.to_vec(), now()).await
            {
                tracing::warn!(%error, "a snapshot nobody wants stays until the next start");
                return;
            }
            carry_out(&shared, &removals).await;
        });
    }

    /// It came up after it was given up.
    pub(super) fn end_late(&self, sandbox: SandboxId) {
        let shared = Arc::clone(&self.shared);
        self.shared.spawn(async move { retry(|| shared.provider.end(&sandbox)).await });
    }

    fn end(&mut self, sandbox: SandboxId) {
        self.detach();
        let (shared, notes, epoch) =
            (Arc::clone(&self.shared), self.notes_in.clone(), self.state.epoch);
        self.shared.spawn(async move {
            retry(|| shared.provider.end(&sandbox)).await;
            let _ = notes.send(Note::Input(Input::Discarded { epoch }, Vec::new()));
        });
    }

    /// An archived session keeps its newest state and what is pinned.
    pub(super) fn trim(&self) {
        let (shared, session) = (Arc::clone(&self.shared), self.id().clone());
        self.shared.spawn(async move {
            if let Err(error) = keep_to_rules(&shared).await {
                tracing::warn!(%session, error = words(&error), "old snapshots cannot be forgotten");
            }
        });
    }

    /// At most one review runs; what is pushed meanwhile is looked at after it.
    pub(super) fn review(&mut self) {
        if let Some(again) = &mut self.reviewing {
            *again = true;
            return;
        }
        self.reviewing = Some(false);
        let (shared, notes, session) =
            (Arc::clone(&self.shared), self.notes_in.clone(), self.id().clone());
        self.shared.spawn(async move {
            evidence::review(&shared, &session).await;
            let _ = notes.send(Note::Reviewed);
        });
    }
}

/// The session was deleted while its sandbox started: nobody else will end it.
async fn end_if_deleted(shared: &Shared, session: &harvest_proto::SessionId, sandbox: &SandboxId) {
    if let Err(StoreError::NotFound { .. }) = shared.store.session_get(session).await {
        retry(|| shared.provider.end(sandbox)).await;
    }
}

/// The session was deleted while its disk was kept: nobody else will remove it.
async fn remove_if_deleted(
    shared: &Shared,
    session: &harvest_proto::SessionId,
    snapshot: &SnapshotId,
) {
    if let Err(StoreError::NotFound { .. }) = shared.store.session_get(session).await
        && let Some(snapshots) = shared.provider.snapshots()
    {
        retry(|| snapshots.remove(snapshot)).await;
    }
}

/// A save, or the words why nobody knows what became of it.
async fn in_time<T>(
    shared: &Shared,
    save: impl Future<Output = Result<T, ProviderError>>,
) -> Result<T, String> {
    let limit = shared.config.clocks.save;
    match tokio::time::timeout(limit, save).await {
        Ok(saved) => saved.map_err(|error| words(&error)),
        Err(_) => Err(format!("no answer after {} s", limit.as_secs())),
    }
}

/// What a sandbox starts from, and what its disk holds then.
async fn origin(
    shared: &Shared,
    primary: Option<&str>,
    from: Option<SnapshotId>,
) -> Result<(BootStart, StartFrom), String> {
    if let Some(snapshot) = from {
        return Ok((BootStart::Restore, StartFrom::Snapshot(snapshot)));
    }
    let Some(repository) = primary else {
        return Ok((BootStart::Fresh, StartFrom::Image(shared.config.image.clone())));
    };
    let repository =
        shared.store.repository_get(repository).await.map_err(|error| words(&error))?;
    Ok(match repository.build {
        Some(build) => (BootStart::Image, StartFrom::Snapshot(build.snapshot)),
        None => (BootStart::Fresh, StartFrom::Image(repository.image)),
    })
}

async fn turn_diff(
    shared: &Shared,
    session: &harvest_proto::SessionId,
    bridge: &Bridge,
) -> Option<String> {
    let checkouts = shared.store.session_get(session).await.ok()?.checkouts;
    match tokio::time::timeout(DIFF_LIMIT, checkout::diff(bridge, &checkouts)).await {
        Ok(Ok(diff)) => Some(diff),
        Ok(Err(error)) => {
            tracing::debug!(%session, error = words(&error), "the turn's diff cannot be read");
            None
        }
        Err(_) => None,
    }
}

/// Asks again until there is an answer: what depends on it cannot go on without.
pub(crate) async fn retry<T, F>(mut ask: impl FnMut() -> F) -> T
where
    F: Future<Output = Result<T, ProviderError>>,
{
    let mut wait = Duration::from_millis(50);
    loop {
        match ask().await {
            Ok(answer) => return answer,
            Err(error) => {
                tracing::warn!(error = words(&error), "the provider failed; trying again")
            }
        }
        tokio::time::sleep(wait).await;
        wait = (wait * 2).min(Duration::from_secs(10));
    }
}
