//! Lines about a sync of checkouts, and about work that a turn left behind.

use harvest_proto::event::{CheckoutSync, CommittedWork, SavedWork, SyncOutcome};

use super::text::short_commit;

/// A checkout after a requested sync.
pub(crate) fn synced_checkout(checkout: &CheckoutSync) -> Vec<String> {
    let CheckoutSync { repository, outcome, before, after, .. } = checkout;
    let upstream = checkout.upstream.as_deref().unwrap_or("its base");
    let commit =
        |commit: &Option<String>| short_commit(commit.as_deref().unwrap_or("-")).to_owned();
    let first = match outcome {
        SyncOutcome::UpToDate => format!("{repository} is up to date with {upstream}"),
        SyncOutcome::Rebased => {
            let (before, after) = (commit(before), commit(after));
            format!("Rebased {repository} onto {upstream}: {before} → {after}")
        }
        SyncOutcome::Conflict => {
            format!("Conflict: {repository} with {upstream}; the branch is as before")
        }
        SyncOutcome::Failed => {
            let error = checkout.error.as_deref().unwrap_or("no reason given");
            format!("Not synced: {repository}: {error}")
        }
    };
    let line = |name: &str, value: String| format!("  {:<12}{value}", format!("{name}:"));
    let mut lines = vec![first];
    lines.extend(committed(&checkout.work).map(|text| line("committed", text)));
    lines.extend(left_out(&checkout.work).map(|text| line("left out", text)));
    if !checkout.conflicts.is_empty() {
        lines.push(line("files", checkout.conflicts.join(", ")));
    }
    lines.extend(checkout.commit.clone().map(|text| line("commit", text)));
    lines.extend(checkout.checkpoint.clone().map(|text| line("checkpoint", text)));
    lines.extend(checkout.next.clone().map(|text| line("next", text)));
    lines
}

/// What the end of a turn has saved.
pub(super) fn saved_work(saved: &SavedWork) -> Vec<String> {
    let SavedWork { repository, work, pushed, error } = saved;
    let mut lines = Vec::new();
    lines.extend(committed(work).map(|text| format!("Saved {text} in {repository}")));
    lines.extend(
        pushed.as_deref().map(|commit| format!("Pushed {} to {repository}", short_commit(commit))),
    );
    lines.extend(left_out(work).map(|text| format!("Left out in {repository}: {text}")));
    lines.extend(error.as_ref().map(|error| format!("warning: {repository}: {error}")));
    lines
}

fn committed(work: &CommittedWork) -> Option<String> {
    let files = if work.files == 1 { "file" } else { "files" };
    let snapshot = short_commit(work.snapshot.as_deref()?);
    Some(format!("{} uncommitted {files} as {snapshot}", work.files))
}

fn left_out(work: &CommittedWork) -> Option<String> {
    (!work.left_out.is_empty()).then(|| work.left_out.join(", "))
}
