//! `harvest diff`: what a session has changed, as `git diff` prints it; or which files, of the checkouts or
//! of the whole machine.

use anyhow::Result;
use harvest_proto::api::{ChangeKind, DiffFiles, MachineChange, MachineChanges};
use serde_json::json;

use crate::{
    Invocation,
    cli::{
        Diff,
        units::{Turns, bytes},
    },
    client::Client,
    plain::plain_line,
    printer::table,
    resolve,
};

pub(crate) async fn run(here: &Invocation, args: &Diff) -> Result<u8> {
    let client = Client::find(&here.config)?;
    let id = resolve::session(&client, &args.session).await?;
    let range = args.turn.map(Turns::query).unwrap_or_default();
    if args.machine {
        let changes = client.diff_machine(&id, &range).await?;
        here.print.result(&changes, |changes| machine_text(changes, args.stat))?;
        if changes.cut && !args.stat {
            here.print.note("not everything is listed");
        }
    } else if args.stat {
        let files = client.diff_files(&id, &range).await?;
        here.print.result(&files, files_text)?;
        if files.cut {
            here.print.note("not everything is listed");
        }
    } else {
        let diff = client.diff(&id, &range).await?;
        if diff.is_empty() {
            here.print.note("no changes");
        }
        match here.print.json {
            true => {
                here.print.result(&json!({ "session": id, "diff": diff }), |_| String::new())?
            }
            false => here.print.exact(&diff)?,
        }
    }
    Ok(0)
}

fn files_text(files: &DiffFiles) -> String {
    let lines = |number: Option<u64>, sign: &str| match number {
        Some(number) => format!("{sign}{number}"),
        None => "not text".to_owned(),
    };
    let row = |file: &harvest_proto::api::FileDiff| {
        let path = format!("{}/{}", file.repository, file.path);
        vec![lines(file.insertions, "+"), lines(file.deletions, "−"), plain_line(&path)]
    };
    let rows: Vec<_> = files.items.iter().map(row).collect();
    let total = files.total;
    let sum = format!("{} files, +{} −{}\n", total.files, total.insertions, total.deletions);
    if rows.is_empty() { sum } else { format!("{}{sum}", table(&["NEW", "GONE", "FILE"], &rows)) }
}

fn machine_text(changes: &MachineChanges, only_numbers: bool) -> String {
    let mut text = String::new();
    if !only_numbers {
        text.extend(changes.items.iter().map(machine_line));
    }
    let MachineChanges { added, changed, removed, .. } = changes;
    text + &format!("{added} added, {changed} changed, {removed} removed\n")
}

/// `+ /path (12 kB)`; a folder ends with a slash.
fn machine_line(change: &MachineChange) -> String {
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
    format!("{sign} {}{end}{size}\n", plain_line(&change.path))
}
