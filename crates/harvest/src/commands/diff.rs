//! `harvest diff`: prints a session's changes like `git diff`, or only the changed files of the
//! checkouts or of the whole sandbox.

use anyhow::Result;
use harvest_proto::api::{ChangeKind, DiffFiles, FileChange, FileChanges, FileDiff};
use serde_json::json;

use crate::{
    Invocation,
    cli::{
        DiffArgs,
        units::{TurnRange, bytes},
    },
    printer::count,
    sanitize::sanitize_line,
};

/// The longest bar of `--stat`.
const BAR_CELLS: u64 = 40;

pub(crate) async fn run(ctx: &Invocation, args: &DiffArgs) -> Result<u8> {
    let (client, id) = ctx.session(&args.session).await?;
    let range = args.turn.map(TurnRange::query).unwrap_or_default();
    if args.sandbox {
        let changes: FileChanges =
            client.get(&format!("/v1/sessions/{id}/diff/sandbox{range}")).await?;
        ctx.print.result(&changes, |changes| sandbox_changes(changes, args.stat))?;
        if changes.cut && !args.stat {
            ctx.print.note("the list is truncated");
        }
    } else if args.stat {
        let files: DiffFiles = client.get(&format!("/v1/sessions/{id}/diff/files{range}")).await?;
        ctx.print.result(&files, files_text)?;
        if files.cut {
            ctx.print.note("the list is truncated");
        }
    } else {
        let diff = client.diff(&id, &range).await?;
        if diff.is_empty() {
            ctx.print.note("no changes");
        }
        match ctx.print.json {
            true => ctx.print.document(&json!({ "session": id, "diff": diff }))?,
            false => ctx.print.verbatim(&diff)?,
        }
    }
    Ok(0)
}

/// Formats changed files like `git diff --stat`.
fn files_text(files: &DiffFiles) -> String {
    let path = |file: &FileDiff| sanitize_line(&format!("{}/{}", file.repository, file.path));
    let width = files.items.iter().map(|file| path(file).chars().count()).max().unwrap_or(0);
    let line = |file: &FileDiff| {
        let change = match (file.insertions, file.deletions) {
            (Some(insertions), Some(deletions)) => change_bar(insertions, deletions),
            _ => "Bin".to_owned(),
        };
        format!(" {:<width$} | {change}\n", path(file))
    };
    let total = files.total;
    let sum = format!(
        " {} changed, {}(+), {}(-)\n",
        count(total.files, "file"),
        count(total.insertions, "insertion"),
        count(total.deletions, "deletion")
    );
    files.items.iter().map(line).collect::<String>() + &sum
}

/// `12 ++++----`, scaled down to [`BAR_CELLS`].
fn change_bar(insertions: u64, deletions: u64) -> String {
    let total = insertions + deletions;
    let cells = |lines: u64| match total <= BAR_CELLS {
        true => lines,
        false => (lines * BAR_CELLS / total).max(u64::from(lines > 0)),
    };
    let repeat = |sign: &str, lines: u64| sign.repeat(usize::try_from(cells(lines)).unwrap_or(0));
    format!("{total} {}{}", repeat("+", insertions), repeat("-", deletions)).trim_end().to_owned()
}

fn sandbox_changes(changes: &FileChanges, only_counts: bool) -> String {
    let mut text = String::new();
    if !only_counts {
        text.extend(changes.items.iter().map(sandbox_change));
    }
    let FileChanges { added, changed, removed, .. } = changes;
    text + &format!("{added} added, {changed} changed, {removed} removed\n")
}

/// `+ /path (12 kB)`; a folder ends with a slash.
fn sandbox_change(change: &FileChange) -> String {
    let sign = match change.change {
        ChangeKind::Added => '+',
        ChangeKind::Changed => '~',
        ChangeKind::Removed => '-',
    };
    let size = match (change.before_bytes, change.after_bytes) {
        (Some(before), Some(after)) if before != after => {
            format!(" ({} → {})", bytes(before), bytes(after))
        }
        (Some(size), _) | (None, Some(size)) => format!(" ({})", bytes(size)),
        (None, None) => String::new(),
    };
    let end = if change.kind == "folder" { "/" } else { "" };
    format!("{sign} {}{end}{size}\n", sanitize_line(&change.path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn change_bar_is_scaled_like_git() {
        assert_eq!(change_bar(2, 1), "3 ++-");
        assert_eq!(change_bar(0, 0), "0");
        assert_eq!(change_bar(10_000, 1), format!("10001 {}-", "+".repeat(39)));
    }
}
