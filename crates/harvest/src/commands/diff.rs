//! `harvest diff`: prints a session's changes like `git diff`, or only the changed files of the
//! checkouts or of the whole sandbox.

use std::collections::BTreeMap;

use anyhow::Result;
use harvest_proto::{
    RepositoryName,
    api::{ChangeKind, DiffFiles, FileChange, FileChanges, FileDiff, SessionRepository},
};
use serde_json::json;

use crate::{
    Invocation,
    cli::{
        DiffArgs,
        units::{TurnRange, bytes},
    },
    pager,
    printer::count,
    sanitize::{sanitize, sanitize_line},
    style::Palette,
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
        match ctx.print.json {
            true => ctx.print.document(&files)?,
            false => {
                let folders = folders(&client.session(&id).await?.repositories);
                ctx.print.styled_out(&files_text(ctx.print.stdout, &files, &folders))?;
            }
        }
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
            false if ctx.print.stdout.is_plain() && !ctx.print.pages() => {
                ctx.print.verbatim(&diff)?
            }
            false => pager::show(ctx.print, &colored(ctx.print.stdout, &sanitize(&diff)))?,
        }
    }
    Ok(0)
}

/// Colours a diff like git.
pub(crate) fn colored(style: Palette, diff: &str) -> String {
    let mut in_header = false;
    let line = |line: &str| {
        in_header = line.starts_with("diff --git ") || (in_header && !line.starts_with("@@"));
        let painted = match line.chars().next() {
            _ if in_header => style.bold(line),
            Some('@') => style.info(line),
            Some('+') => style.ok(line),
            Some('-') => style.fail(line),
            _ => line.to_owned(),
        };
        painted + "\n"
    };
    diff.lines().map(line).collect()
}

/// The path prefix of each repository: none for a single one, otherwise its folder, as in `diff`.
fn folders(repositories: &[SessionRepository]) -> BTreeMap<RepositoryName, String> {
    let folder = |repository: &SessionRepository| match repositories.len() {
        1 => String::new(),
        _ => format!("{}/", repository.folder.rsplit('/').next().unwrap_or_default()),
    };
    repositories.iter().map(|repository| (repository.name.clone(), folder(repository))).collect()
}

/// Formats changed files like `git diff --stat`.
fn files_text(
    style: Palette,
    files: &DiffFiles,
    folders: &BTreeMap<RepositoryName, String>,
) -> String {
    let path = |file: &FileDiff| {
        let folder = folders.get(&file.repository).map_or("", String::as_str);
        sanitize_line(&format!("{folder}{}", file.path))
    };
    let width = files.items.iter().map(|file| path(file).chars().count()).max().unwrap_or(0);
    let line = |file: &FileDiff| {
        let change = match (file.insertions, file.deletions) {
            (Some(insertions), Some(deletions)) => change_bar(style, insertions, deletions),
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
fn change_bar(style: Palette, insertions: u64, deletions: u64) -> String {
    let total = insertions + deletions;
    let cells = |lines: u64| match total <= BAR_CELLS {
        true => lines,
        false => (lines * BAR_CELLS / total).max(u64::from(lines > 0)),
    };
    let repeat = |sign: &str, lines: u64| sign.repeat(usize::try_from(cells(lines)).unwrap_or(0));
    let (added, removed) = (repeat("+", insertions), repeat("-", deletions));
    format!("{total} {}{}", style.ok(&added), style.fail(&removed)).trim_end().to_owned()
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
        let bar = |insertions, deletions| change_bar(Palette::default(), insertions, deletions);
        assert_eq!(bar(2, 1), "3 ++-");
        assert_eq!(bar(0, 0), "0");
        assert_eq!(bar(10_000, 1), format!("10001 {}-", "+".repeat(39)));
    }

    #[test]
    fn header_lines_are_not_colored_as_changes() {
        let diff = "diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n--- old\n+new\n same\n";
        let painted = colored(Palette::new(true, None), diff);
        let lines: Vec<&str> = painted.lines().collect();
        assert!(lines[..3].iter().all(|line| line.starts_with("\x1b[1m")), "{painted:?}");
        assert_eq!(
            lines[3..],
            [
                "\x1b[36m@@ -1 +1 @@\x1b[0m",
                "\x1b[31m--- old\x1b[0m",
                "\x1b[32m+new\x1b[0m",
                " same"
            ]
        );
        assert_eq!(colored(Palette::default(), diff), diff);
    }

    #[test]
    fn stat_names_folders_only_among_several_repositories() {
        let repository = |name: &str, folder: &str| SessionRepository {
            name: name.parse().unwrap(),
            folder: folder.into(),
            url: String::new(),
            base: None,
            branch: "b".parse().unwrap(),
            pr: None,
        };
        let one = [repository("acme/web", "/workspace/web")];
        assert_eq!(folders(&one).into_values().collect::<Vec<_>>(), [""]);
        let two = [one[0].clone(), repository("other/web", "/workspace/other-web")];
        assert_eq!(folders(&two).into_values().collect::<Vec<_>>(), ["web/", "other-web/"]);
    }
}
