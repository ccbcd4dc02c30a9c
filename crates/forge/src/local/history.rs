//! Reads commits, changes, trees and references of a repository. Names that come from requests are
//! resolved here; every other function takes full object ids.

use std::path::Path;

use harvest_proto::BranchName;

use super::{ForgeError, git};

// A hundred commits with long messages. Larger answers are refused.
const MAX_LOG_BYTES: usize = 32 << 20;
// As many as GitHub lists.
const MAX_CHANGES: usize = 3000;
const MAX_PATCH_BYTES: usize = 3 << 20;
const MAX_LISTING_BYTES: usize = 16 << 20;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Signature {
    pub(super) name: String,
    pub(super) email: String,
    pub(super) date: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Commit {
    pub(super) sha: String,
    pub(super) tree: String,
    pub(super) parents: Vec<String>,
    pub(super) author: Signature,
    pub(super) committer: Signature,
    pub(super) message: String,
}

/// A branch or tag.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Reference {
    pub(super) name: String,
    pub(super) sha: String,
    /// The type of the object: `commit`, `tag`, …
    pub(super) kind: String,
}

/// A changed file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct FileChange {
    pub(super) status: &'static str,
    pub(super) path: String,
    pub(super) previous: Option<String>,
    pub(super) blob: String,
    pub(super) additions: u64,
    pub(super) deletions: u64,
    /// Without it for binary files, and when all patches together are too long.
    pub(super) patch: Option<String>,
}

/// An entry of a folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TreeEntry {
    pub(super) mode: String,
    pub(super) sha: String,
    pub(super) size: u64,
    pub(super) path: String,
}

pub(super) fn is_object_id(text: &str) -> bool {
    text.len() == 40 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// The commit that a branch, a tag or an object id names.
pub(super) async fn resolve(repository: &Path, name: &str) -> Result<Option<String>, ForgeError> {
    let name = name.strip_prefix("refs/").unwrap_or(name);
    let is_abbreviation =
        (4..=40).contains(&name.len()) && name.bytes().all(|byte| byte.is_ascii_hexdigit());
    let mut candidates = Vec::new();
    // Only plain names: git's own syntax could search the whole history.
    if name.parse::<BranchName>().is_ok() {
        candidates.extend([
            format!("refs/heads/{name}^{{commit}}"),
            format!("refs/tags/{name}^{{commit}}"),
            format!("refs/{name}^{{commit}}"),
        ]);
    }
    if name == "HEAD" {
        candidates.push("HEAD^{commit}".to_owned());
    }
    if is_abbreviation {
        candidates.push(format!("{name}^{{commit}}"));
    }
    for candidate in candidates {
        let arguments = ["rev-parse", "--verify", "--quiet", "--end-of-options", &candidate];
        let found = git::run(repository, "look up a commit", &arguments).await;
        if let Ok(sha) = found
            && is_object_id(sha.trim())
        {
            return Ok(Some(sha.trim().to_owned()));
        }
    }
    Ok(None)
}

/// Which commits to list.
#[derive(Debug, Default)]
pub(super) struct CommitFilter<'a> {
    pub(super) path: Option<&'a str>,
    pub(super) since: Option<String>,
    pub(super) until: Option<String>,
}

impl CommitFilter<'_> {
    fn options(&self) -> Vec<String> {
        let since = self.since.as_ref().map(|time| format!("--since={time}"));
        let until = self.until.as_ref().map(|time| format!("--until={time}"));
        since.into_iter().chain(until).collect()
    }
}

/// Commits that `range` reaches, newest first: revisions and `^revisions`.
pub(super) async fn commits(
    repository: &Path,
    range: &[&str],
    filter: &CommitFilter<'_>,
    (skip, count): (usize, usize),
) -> Result<Vec<Commit>, ForgeError> {
    let (skip, count) = (format!("--skip={skip}"), format!("--max-count={count}"));
    let options = filter.options();
    let mut arguments = vec![
        "log",
        "-z",
        "--no-color",
        "--no-notes",
        "--no-show-signature",
        "--encoding=UTF-8",
        "--date=format-local:%Y-%m-%dT%H:%M:%SZ",
        "--format=tformat:%H%n%T%n%P%n%an%n%ae%n%ad%n%cn%n%ce%n%cd%n%B",
        &skip,
        &count,
    ];
    arguments.extend(options.iter().map(String::as_str));
    arguments.push("--end-of-options");
    arguments.extend(range);
    arguments.push("--");
    arguments.extend(filter.path);
    let (bytes, more) = git::limited(repository, "list commits", &arguments, MAX_LOG_BYTES).await?;
    if more {
        return Err(too_long("list commits"));
    }
    let text = String::from_utf8_lossy(&bytes);
    Ok(text.split('\0').filter_map(parse_commit).collect())
}

pub(super) async fn commit(repository: &Path, sha: &str) -> Result<Commit, ForgeError> {
    let found = commits(repository, &[sha], &CommitFilter::default(), (0, 1)).await?;
    found.into_iter().next().ok_or_else(|| ForgeError::Git {
        doing: "read a commit",
        message: format!("there is no commit {sha}"),
    })
}

fn parse_commit(record: &str) -> Option<Commit> {
    let mut lines = record.splitn(10, '\n');
    let mut next = || lines.next().map(str::to_owned);
    let (sha, tree, parents) = (next()?, next()?, next()?);
    let author = Signature { name: next()?, email: next()?, date: next()? };
    let committer = Signature { name: next()?, email: next()?, date: next()? };
    let message = next()?.trim_end().to_owned();
    let parents = parents.split_ascii_whitespace().map(str::to_owned).collect();
    Some(Commit { sha, tree, parents, author, committer, message })
}

/// How many commits `range` reaches.
pub(super) async fn count(
    repository: &Path,
    range: &[&str],
    filter: &CommitFilter<'_>,
) -> Result<usize, ForgeError> {
    let options = filter.options();
    let mut arguments = vec!["rev-list", "--count"];
    arguments.extend(options.iter().map(String::as_str));
    arguments.push("--end-of-options");
    arguments.extend(range);
    arguments.push("--");
    arguments.extend(filter.path);
    let count = git::run(repository, "count commits", &arguments).await?;
    Ok(count.trim().parse().unwrap_or(0))
}

/// The best common ancestor, if the histories have one.
pub(super) async fn merge_base(
    repository: &Path,
    one: &str,
    other: &str,
) -> Result<Option<String>, ForgeError> {
    let arguments = ["merge-base", "--end-of-options", one, other];
    match git::run(repository, "find a merge base", &arguments).await {
        Ok(base) => Ok(Some(base.trim().to_owned())),
        // Exit code 1 without a message: there is none.
        Err(ForgeError::Git { message, .. }) if message.is_empty() => Ok(None),
        Err(error) => Err(error),
    }
}

/// The references below `refs/` whose names start with `prefix`, sorted by name.
pub(super) async fn references(
    repository: &Path,
    prefix: &str,
) -> Result<Vec<Reference>, ForgeError> {
    let format = "--format=%(refname)%00%(objectname)%00%(objecttype)";
    let list = git::run(repository, "list references", &["for-each-ref", format, "refs/"]).await?;
    let parse = |line: &str| {
        let mut fields = line.split('\0').map(str::to_owned);
        Some(Reference { name: fields.next()?, sha: fields.next()?, kind: fields.next()? })
    };
    Ok(list
        .lines()
        .filter_map(parse)
        .filter(|reference| reference.name.starts_with(prefix))
        .collect())
}

/// The files that differ between two commits, with renames found.
pub(super) async fn changes(
    repository: &Path,
    from: &str,
    to: &str,
) -> Result<Vec<FileChange>, ForgeError> {
    let doing = "compare two commits";
    let options = ["diff", "--no-color", "--no-ext-diff", "--no-textconv", "--find-renames"];
    let listed = ["--raw", "--numstat", "--no-abbrev", "-z", "--end-of-options", from, to, "--"];
    let arguments = [&options[..], &listed].concat();
    let (bytes, more) = git::limited(repository, doing, &arguments, MAX_LISTING_BYTES).await?;
    if more {
        return Err(too_long(doing));
    }
    let mut changes = parse_changes(&String::from_utf8_lossy(&bytes));
    let patches = ["--patch", "--end-of-options", from, to, "--"];
    let arguments = [&options[..], &patches].concat();
    let (bytes, more) = git::limited(repository, doing, &arguments, MAX_PATCH_BYTES).await?;
    if !more {
        add_patches(&mut changes, &String::from_utf8_lossy(&bytes));
    }
    changes.truncate(MAX_CHANGES);
    Ok(changes)
}

/// Parses `git diff --raw --numstat -z`: all raw entries, then all numbers, in the same order.
fn parse_changes(text: &str) -> Vec<FileChange> {
    let mut fields = text.split('\0');
    let mut changes = Vec::new();
    let mut numbers = None;
    while let Some(field) = fields.next() {
        let Some(raw) = field.strip_prefix(':') else {
            numbers = Some(field);
            break;
        };
        let columns: Vec<&str> = raw.split(' ').collect();
        let [_, _, old, new, letter] = columns[..] else { break };
        let Some(first) = fields.next() else { break };
        let moved = letter.starts_with(['R', 'C']);
        let (previous, path) = match moved.then(|| fields.next()).flatten() {
            Some(path) => (Some(first.to_owned()), path),
            None => (None, first),
        };
        let status = match letter.as_bytes().first() {
            Some(b'A') => "added",
            Some(b'D') => "removed",
            Some(b'R') => "renamed",
            Some(b'C') => "copied",
            Some(b'T') => "changed",
            _ => "modified",
        };
        let blob = if status == "removed" { old } else { new }.to_owned();
        let path = path.to_owned();
        changes.push(FileChange {
            status,
            path,
            previous,
            blob,
            additions: 0,
            deletions: 0,
            patch: None,
        });
    }
    for change in &mut changes {
        let Some(line) = numbers.take().or_else(|| fields.next()) else { break };
        let mut columns = line.splitn(3, '\t');
        // Binary files have `-` for both.
        let mut number = || columns.next().and_then(|text| text.parse().ok()).unwrap_or(0);
        (change.additions, change.deletions) = (number(), number());
        if columns.next().is_none_or(str::is_empty) {
            // A rename: both paths follow as fields of their own.
            fields.next();
            fields.next();
        }
    }
    changes
}

/// Sets the patch of each change: sections of `git diff` come in the order of its raw entries.
fn add_patches(changes: &mut [FileChange], text: &str) {
    let mut sections: Vec<&str> = Vec::new();
    let mut start = None;
    let mut position = 0;
    for line in text.split_inclusive('\n') {
        if line.starts_with("diff --git ") {
            sections.extend(start.map(|start| &text[start..position]));
            start = Some(position);
        }
        position += line.len();
    }
    sections.extend(start.map(|start| &text[start..]));
    if sections.len() != changes.len() {
        return;
    }
    for (change, section) in changes.iter_mut().zip(sections) {
        let patch = section.find("\n@@ ").map(|at| section[at + 1..].trim_end_matches('\n'));
        change.patch = patch.map(str::to_owned);
    }
}

/// The entry at a path of a commit; `None` when nothing is there.
pub(super) async fn entry(
    repository: &Path,
    commit: &str,
    path: &str,
) -> Result<Option<TreeEntry>, ForgeError> {
    let arguments = ["--full-tree", "--end-of-options", commit, "--", path];
    let found = list_tree(repository, &arguments).await?;
    Ok(found.into_iter().find(|entry| entry.path == path))
}

/// The entries of a tree, without those of its folders.
pub(super) async fn tree(repository: &Path, sha: &str) -> Result<Vec<TreeEntry>, ForgeError> {
    list_tree(repository, &["--full-tree", "--end-of-options", sha]).await
}

async fn list_tree(repository: &Path, arguments: &[&str]) -> Result<Vec<TreeEntry>, ForgeError> {
    let arguments = [&["ls-tree", "-z", "-l"], arguments].concat();
    let (bytes, more) =
        git::limited(repository, "list a folder", &arguments, MAX_LISTING_BYTES).await?;
    if more {
        return Err(too_long("list a folder"));
    }
    let parse = |record: &str| {
        let (columns, path) = record.split_once('\t')?;
        let columns: Vec<&str> = columns.split_ascii_whitespace().collect();
        let [mode, _, sha, size] = columns[..] else { return None };
        let (mode, sha, path) = (mode.to_owned(), sha.to_owned(), path.to_owned());
        Some(TreeEntry { mode, sha, size: size.parse().unwrap_or(0), path })
    };
    Ok(String::from_utf8_lossy(&bytes).split('\0').filter_map(parse).collect())
}

fn too_long(doing: &'static str) -> ForgeError {
    ForgeError::Git { doing, message: "the result is too long".to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn raw_entries_and_numbers_are_matched() {
        let id = "0".repeat(40);
        let raw = format!(
            ":100644 100644 {id} {id} M\0a b\0:100644 100644 {id} {id} R090\0old\0new\0\
             :000000 100644 {id} {id} A\0bin\x001\t2\ta b\x003\t4\t\0old\0new\0-\t-\tbin\0"
        );
        let changes = parse_changes(&raw);
        let brief: Vec<_> = changes
            .iter()
            .map(|change| (change.status, &*change.path, change.additions, change.deletions))
            .collect();
        let expected =
            [("modified", "a b", 1, 2), ("renamed", "new", 3, 4), ("added", "bin", 0, 0)];
        assert_eq!(brief, expected);
        assert_eq!(changes[1].previous.as_deref(), Some("old"));
    }

    #[test]
    fn patches_follow_the_order_of_entries() {
        let change = |path: &str| FileChange {
            status: "modified",
            path: path.to_owned(),
            previous: None,
            blob: String::new(),
            additions: 0,
            deletions: 0,
            patch: None,
        };
        let mut changes = [change("a"), change("b")];
        let text = "diff --git a/a b/a\n--- a/a\n+++ b/a\n@@ -1 +1 @@\n-x\n+y\n\
                    diff --git a/b b/b\nBinary files differ\n";
        add_patches(&mut changes, text);
        assert_eq!(changes[0].patch.as_deref(), Some("@@ -1 +1 @@\n-x\n+y"));
        assert_eq!(changes[1].patch, None);
    }
}
