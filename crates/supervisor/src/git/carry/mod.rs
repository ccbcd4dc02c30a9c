//! Carries work forward: a sync commits what is not committed, fetches, and rebases each checkout
//! onto its base; the end of a turn commits and pushes what its agent left behind. See
//! `docs/decisions/0039-safe-carry-forward.md`.

mod checkpoint;
mod job;
mod leftovers;
mod repo;
mod report;

use std::{path::Path, rc::Rc, time::Duration};

use harvest_proto::{
    EventBody,
    bridge::{Author, Checkout, Fault, FaultCode, Reply, RequestId, SyncRequest, SyncTarget},
    event::{CheckoutSync, CommittedWork, SavedWork, SyncOutcome},
    redact,
};

pub(super) use self::job::{CarryJob, run as run_job};
use self::report::Report;
use super::{Git, LOCAL_TIMEOUT, has_repository, program::Job, queries::is_object_id};
use crate::{
    capture, connection::Connection, outbox::Outbox, sandbox::Sandbox, turn::Turns,
    users::AGENT_USER,
};

// Enough for a branch of hundreds of commits in a large repository.
const REBASE_TIMEOUT: Duration = Duration::from_secs(10 * 60);

// Enough for the commits of a turn while the gateway restarts.
const PUSH_TIMEOUT: Duration = Duration::from_secs(10 * 60);

/// Harvest's folder below git's own.
const OWN_FOLDER: &str = ".git/harvest";

const FETCH_AGAIN: &str = "`harvest sync SESSION` tries again";

/// Starts a sync. It goes on without the connection.
pub(crate) fn start(
    connection: &Rc<Connection>,
    outbox: &Rc<Outbox>,
    turns: &Rc<Turns>,
    id: RequestId,
    request: SyncRequest,
) -> Result<(), Fault> {
    let user = connection.sandbox.user(Some(AGENT_USER))?;
    let ids = request.checkouts.iter().filter_map(|target| target.began.as_deref());
    if let Some(id) = ids.into_iter().find(|id| !is_object_id(id)) {
        return Err(Fault::invalid(format!("`{id}` is not an object id")));
    }
    refuse_during_turn(turns)?;
    let (connection, outbox, turns) = (Rc::clone(connection), Rc::clone(outbox), Rc::clone(turns));
    let sandbox = Rc::clone(&connection.sandbox);
    tokio::task::spawn_local(async move {
        let _keeps_the_sandbox_busy = sandbox.detached.register();
        let git = Git { sandbox: &sandbox, user: &user };
        let begun = begin(&sandbox, &turns).await;
        if begun.is_ok() {
            git.sync_all(&outbox, request).await;
        }
        connection.reply(id, begun.map(|()| Reply::Done)).await;
    });
    Ok(())
}

/// Waits for another sync, such as that of a boot; then prompts wait for this one.
async fn begin(sandbox: &Sandbox, turns: &Turns) -> Result<(), Fault> {
    while sandbox.sync.is_running() {
        sandbox.sync.over().await;
    }
    if let Some(reason) = sandbox.sync.failure() {
        return Err(Fault::new(FaultCode::NotReady, reason));
    }
    refuse_during_turn(turns)?;
    sandbox.sync.begin();
    Ok(())
}

fn refuse_during_turn(turns: &Turns) -> Result<(), Fault> {
    match turns.busy() {
        true => Err(Fault::new(FaultCode::Busy, "a turn is in progress")),
        false => Ok(()),
    }
}

impl Git<'_> {
    async fn sync_all(&self, outbox: &Outbox, request: SyncRequest) {
        let began = std::time::Instant::now();
        let SyncRequest { author, checkouts: targets } = request;
        let mut checkouts = Vec::new();
        for target in &targets {
            checkouts.push(self.carry_forward(target, &author).await);
        }
        self.sandbox.sync.end(&[]);
        let millis = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
        outbox.push(None, EventBody::SyncEnded { checkouts, millis });
    }

    async fn carry_forward(&self, target: &SyncTarget, author: &Author) -> CheckoutSync {
        let SyncTarget { checkout, began } = target;
        let folder = self.folder(&checkout.folder);
        let mut sync = CheckoutSync {
            repository: checkout.name.clone(),
            outcome: SyncOutcome::Failed,
            branch: None,
            upstream: None,
            before: None,
            after: None,
            base: None,
            work: CommittedWork::default(),
            checkpoint: None,
            conflicts: Vec::new(),
            commit: None,
            error: None,
            next: None,
        };
        if !has_repository(&folder) {
            sync.error = Some(format!("{folder} is no git checkout"));
            sync.next = Some("`harvest restore SESSION@TURN` brings it back".to_owned());
            return sync;
        }
        let commit = CarryJob::Commit { author: author.clone() };
        let report = self.carry_job(&checkout.folder, commit, LOCAL_TIMEOUT).await;
        (sync.branch, sync.before, sync.work) = (report.branch, report.before.clone(), report.work);
        sync.after = report.before;
        if report.error.is_some() {
            (sync.error, sync.next) = (report.error, report.next);
            return sync;
        }
        if let Err(tail) = self.fetch(&folder, checkout).await {
            let base = checkout.base.as_ref();
            sync.error = Some(crate::boot::sync_error(&checkout.name, base, tail));
            sync.next = Some(FETCH_AGAIN.to_owned());
            return sync;
        }
        match self.base(&folder, checkout).await {
            Some(base) => {
                sync.upstream = Some(format!("origin/{base}"));
                let onto = format!("refs/remotes/origin/{base}");
                self.rebase(checkout, author, (&onto, began.as_deref()), &mut sync).await;
            }
            // An empty repository: nothing to follow.
            None => sync.outcome = SyncOutcome::UpToDate,
        }
        sync
    }

    async fn rebase(
        &self,
        checkout: &Checkout,
        author: &Author,
        (onto, began): (&str, Option<&str>),
        sync: &mut CheckoutSync,
    ) {
        let job = || CarryJob::Rebase {
            author: author.clone(),
            onto: onto.to_owned(),
            began: began.map(str::to_owned),
        };
        let mut report = self.carry_job(&checkout.folder, job(), REBASE_TIMEOUT).await;
        if report.needs_history {
            if let Err(tail) = self.complete_history(&self.folder(&checkout.folder)).await {
                let base = checkout.base.as_ref();
                sync.error = Some(crate::boot::sync_error(&checkout.name, base, tail));
                sync.next = Some(FETCH_AGAIN.to_owned());
                return;
            }
            report = self.carry_job(&checkout.folder, job(), REBASE_TIMEOUT).await;
        }
        sync.outcome = match &report {
            Report { error: Some(_), .. } => SyncOutcome::Failed,
            Report { conflicts, .. } if !conflicts.is_empty() => SyncOutcome::Conflict,
            Report { after: None, .. } => SyncOutcome::Failed,
            Report { after, .. } if *after == sync.before => SyncOutcome::UpToDate,
            _ => SyncOutcome::Rebased,
        };
        if report.after.is_none() {
            // A job that was killed could not undo its rebase.
            self.recover(checkout).await;
        }
        sync.after = report.after.or(sync.after.take());
        (sync.base, sync.checkpoint) = (report.base, report.checkpoint);
        (sync.conflicts, sync.commit) = (report.conflicts, report.commit);
        (sync.error, sync.next) = (report.error, report.next);
    }

    /// Undoes a rebase of Harvest that was interrupted; returns a message if there was one.
    pub(crate) async fn recover(&self, checkout: &Checkout) -> Option<String> {
        let own = Path::new(&self.folder(&checkout.folder)).join(OWN_FOLDER);
        // Usually there is nothing to look after: no process then.
        if self.user.access(|| std::fs::symlink_metadata(&own)).is_err() {
            return None;
        }
        let report = self.carry_job(&checkout.folder, CarryJob::Recover, LOCAL_TIMEOUT).await;
        let name = &checkout.name;
        match report {
            Report { error: Some(error), .. } => {
                Some(format!("cannot undo an interrupted sync of {name}: {error}"))
            }
            Report { undone: true, .. } => Some(format!(
                "a sync of {name} was interrupted and is undone: all work is there; \
                 `harvest sync SESSION` syncs it again"
            )),
            _ => None,
        }
    }

    /// Makes a checkpoint of the commits of `reference` that `without` does not have, before its
    /// branch is moved; returns a message if there are any.
    pub(super) async fn keep(
        &self,
        checkout: &str,
        reference: &str,
        without: &str,
    ) -> Option<String> {
        let (reference, without) = (reference.to_owned(), without.to_owned());
        let keep = CarryJob::Keep { reference, without };
        let name = self.carry_job(checkout, keep, LOCAL_TIMEOUT).await.checkpoint?;
        Some(format!("commits of {checkout} that are on no other branch are kept as {name}"))
    }

    /// Commits and pushes what the agent left behind in a checkout. Nothing if it left nothing.
    pub(crate) async fn save_work(
        &self,
        checkout: &Checkout,
        author: &Author,
        turn: u32,
    ) -> Option<SavedWork> {
        let folder = self.folder(&checkout.folder);
        let branch = checkout.branch.as_ref().filter(|_| has_repository(&folder))?.to_string();
        let base = self.base(&folder, checkout).await;
        let message = format!("wip: uncommitted work of turn {turn}");
        let save = CarryJob::Save { author: author.clone(), branch: branch.clone(), base, message };
        let report = self.carry_job(&checkout.folder, save, LOCAL_TIMEOUT).await;
        let next = report.next.map_or_else(String::new, |next| format!("; {next}"));
        let mut saved = SavedWork {
            repository: checkout.name.clone(),
            error: report.error.map(|error| error + &next),
            work: report.work,
            pushed: None,
        };
        if let Some(commit) = report.push.filter(|commit| is_object_id(commit)) {
            match self.push(checkout, &commit, &branch).await {
                Ok(()) => saved.pushed = Some(commit),
                Err(error) => saved.error = Some(error),
            }
        }
        let CommittedWork { snapshot, left_out, .. } = &saved.work;
        let is_empty = snapshot.is_none() && left_out.is_empty();
        (!is_empty || saved.pushed.is_some() || saved.error.is_some()).then_some(saved)
    }

    async fn push(&self, checkout: &Checkout, commit: &str, branch: &str) -> Result<(), String> {
        let folder = self.folder(&checkout.folder);
        self.set_origin(&folder, &checkout.remote).await?;
        // Rewritten, as by a sync: the gateway lets a session replace its own commits only.
        let to = format!("+{commit}:refs/heads/{branch}");
        let arguments = ["push", "--quiet", "--no-verify", "origin", to.as_str()];
        self.run_for(PUSH_TIMEOUT, &folder, &arguments).await.map(drop)
    }

    async fn carry_job(&self, checkout: &str, job: CarryJob, limit: Duration) -> Report {
        let spec = self.program(checkout, &Job::Carry(job));
        let ran = capture::run(self.sandbox, spec, limit).await.map_err(|fault| fault.message);
        let mut report = match ran.and_then(capture::Captured::ok) {
            Ok(output) => Report::parse(&output).unwrap_or_else(|| failed("git reported nothing")),
            Err(tail) => failed(&tail),
        };
        report.error = report.error.map(|error| redact::redact(&error));
        report
    }
}

fn failed(error: &str) -> Report {
    Report {
        error: Some(error.to_owned()),
        next: Some("look at the checkout with `harvest shell SESSION`".to_owned()),
        ..Report::default()
    }
}
