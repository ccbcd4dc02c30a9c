//! Requested syncs: what their outcome means for the session, and what the agent is told with its
//! next prompt. The same failure three times in a row is reported as something that only a person
//! can solve.

use harvest_proto::{
    EventBody,
    event::{CheckoutSync, SyncOutcome},
};
use serde::{Deserialize, Serialize};

use super::{Action, decider::Decider};

/// So many equal failures are reported.
const REPORTED_AFTER: usize = 3;

/// Syncs of a session.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SyncState {
    /// How many have ended.
    pub ended: u64,
    /// The last one met a conflict, and no prompt has been sent since.
    pub conflict: bool,
    /// What the next prompt tells the agent.
    pub note: Option<String>,
    /// The checkouts after the last one.
    pub last: Vec<CheckoutSync>,
    /// The last failures, if they are equal.
    pub failure: Option<RepeatedFailure>,
}

/// The same failure, several times in a row.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RepeatedFailure {
    pub what: String,
    /// One line for each.
    pub attempts: Vec<String>,
}

impl Decider<'_> {
    pub(super) fn sync_ended(&mut self, checkouts: &[CheckoutSync]) {
        let was_reported = self.state.syncs.is_reported();
        let syncs = &mut self.state.syncs;
        syncs.ended += 1;
        syncs.conflict = checkouts.iter().any(|one| one.outcome == SyncOutcome::Conflict);
        (syncs.note, syncs.last) = (note(checkouts), checkouts.to_vec());
        let failed: Vec<&CheckoutSync> = checkouts.iter().filter(|one| !one.is_current()).collect();
        if failed.is_empty() {
            syncs.failure = None;
            // What the report needed has been done.
            self.state.blocked &= !was_reported;
            return;
        }
        let what = failed.iter().map(|one| what_failed(one)).collect::<Vec<_>>().join("; ");
        let attempt = failed.iter().map(|one| attempt(one)).collect::<Vec<_>>().join("; ");
        let failure = match syncs.failure.take().filter(|failure| failure.what == what) {
            Some(mut failure) => {
                failure.attempts.push(attempt);
                let old = failure.attempts.len().saturating_sub(REPORTED_AFTER);
                failure.attempts.drain(..old);
                failure
            }
            None => RepeatedFailure { what, attempts: vec![attempt] },
        };
        let report = syncs.failure.insert(failure);
        if was_reported || report.attempts.len() < REPORTED_AFTER {
            return;
        }
        let event = report_of(report, &failed);
        syncs.note =
            Some(format!("{}{}", blocked_text(&event), note(checkouts).unwrap_or_default()));
        self.state.blocked = true;
        self.actions.push(Action::SyncBlocked { report: Box::new(event) });
    }
}

impl SyncState {
    fn is_reported(&self) -> bool {
        self.failure.as_ref().is_some_and(|failure| failure.attempts.len() >= REPORTED_AFTER)
    }
}

/// Equal failures have equal texts: without commits, checkpoints and times.
fn what_failed(checkout: &CheckoutSync) -> String {
    let name = &checkout.repository;
    match checkout.outcome {
        SyncOutcome::Conflict => {
            let upstream = checkout.upstream.as_deref().unwrap_or("its base");
            format!("{name}: conflict with {upstream} in {}", checkout.conflicts.join(", "))
        }
        _ => format!("{name}: {}", checkout.error.as_deref().unwrap_or("failed")),
    }
}

fn attempt(checkout: &CheckoutSync) -> String {
    let kept = checkout.checkpoint.as_deref().map(|name| format!(", kept as {name}"));
    let kept = kept.unwrap_or_default();
    match &checkout.commit {
        Some(commit) => {
            let upstream = checkout.upstream.as_deref().unwrap_or("its base");
            format!("git rebase {upstream} stopped at {commit}{kept}")
        }
        None => format!("sync of {}{kept}", checkout.repository),
    }
}

/// The report of a failure that repeats itself.
fn report_of(failure: &RepeatedFailure, failed: &[&CheckoutSync]) -> EventBody {
    let follow = |one: &&CheckoutSync| {
        format!("{} follows {}", one.repository, one.upstream.as_deref().unwrap_or("its base"))
    };
    let join = |texts: Vec<String>| texts.join("; ");
    let needed = failed.iter().filter_map(|one| {
        let next = one.next.as_deref()?;
        Some(format!("{}: {next}", one.repository))
    });
    EventBody::Blocked {
        criterion: join(failed.iter().map(follow).collect()),
        error: failure.what.clone(),
        attempts: failure.attempts.clone(),
        checkpoint: failed.iter().find_map(|one| one.checkpoint.clone()),
        needed_action: join(needed.collect()),
    }
}

fn blocked_text(report: &EventBody) -> String {
    let EventBody::Blocked { criterion, error, attempts, checkpoint, needed_action } = report
    else {
        return String::new();
    };
    let checkpoint = checkpoint.as_deref().unwrap_or("none");
    format!(
        "Harvest tried the same sync {} times without success.\nCriterion: {criterion}\n\
         Error: {error}\nAttempts: {}\nCheckpoint: {checkpoint}\nNeeded: {needed_action}\n\n",
        attempts.len(),
        attempts.join("; ")
    )
}

/// What the agent has to know: nothing if nothing has changed.
fn note(checkouts: &[CheckoutSync]) -> Option<String> {
    let lines: Vec<String> = checkouts.iter().filter_map(note_of).collect();
    if lines.is_empty() {
        return None;
    }
    Some(format!("Harvest synced the checkouts before this prompt.\n{}\n\n", lines.join("\n")))
}

fn note_of(checkout: &CheckoutSync) -> Option<String> {
    let name = &checkout.repository;
    let upstream = checkout.upstream.as_deref().unwrap_or("its base");
    let committed = match &checkout.work.snapshot {
        Some(_) => " Uncommitted work is in the commit `wip: snapshot`.",
        None => "",
    };
    let kept = checkout.checkpoint.as_deref();
    let kept = kept.map(|name| format!(" The commits before are on the local branch {name}."));
    let kept = kept.unwrap_or_default();
    match checkout.outcome {
        SyncOutcome::UpToDate if committed.is_empty() => None,
        SyncOutcome::UpToDate => Some(format!("{name}: up to date with {upstream}.{committed}")),
        SyncOutcome::Rebased => Some(format!(
            "{name}: the branch was rebased onto {upstream}; files may have changed, read them \
             again.{committed}{kept}"
        )),
        SyncOutcome::Conflict => Some(format!(
            "{name}: the branch conflicts with {upstream} in {} and is unchanged.{committed}{kept} \
             Resolve it when the work allows: git rebase {upstream}.",
            checkout.conflicts.join(", ")
        )),
        SyncOutcome::Failed => {
            let error = checkout.error.as_deref().unwrap_or("failed");
            Some(format!("{name}: not synced: {error}.{committed}"))
        }
    }
}
