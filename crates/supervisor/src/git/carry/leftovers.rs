//! Files that a killed rebase leaves behind: git writes them before it knows them. Only files whose
//! content is in the repository are removed, as a command beside the sync may have made others.

use std::{collections::HashMap, fs};

use super::repo::Repo;
use crate::git::untracked;

/// How git begins the names of the files it merges.
const MERGED: &str = ".merge_file_";

/// Arguments of one command.
const CHUNK: usize = 500;

/// Removes what a rebase onto this commit left. Best effort: what stays is committed as work.
pub(super) fn remove(repo: &Repo, base: &str) {
    let untracked = repo.names(&untracked::LIST);
    let files = repo.names(&["ls-tree", "-r", "-z", base]);
    let files: HashMap<&str, &str> = files.iter().filter_map(|entry| tree_entry(entry)).collect();
    let (merged, others): (Vec<&String>, Vec<&String>) =
        untracked.iter().partition(|name| is_merge_file(name));
    let mut removed: Vec<&str> = merged.iter().map(|name| name.as_str()).collect();
    let known: Vec<&str> =
        others.iter().map(|name| name.as_str()).filter(|name| files.contains_key(name)).collect();
    for chunk in known.chunks(CHUNK) {
        let arguments: Vec<&str> = ["hash-object", "--"].iter().chain(chunk).copied().collect();
        let hashes = repo.run(&arguments).unwrap_or_default();
        let hashes = String::from_utf8_lossy(&hashes);
        let same = chunk.iter().zip(hashes.lines());
        let same = same.filter(|(name, hash)| files.get(*name) == Some(hash));
        removed.extend(same.map(|(name, _)| *name));
    }
    for name in removed {
        let _already_gone = fs::remove_file(repo.top.join(name));
    }
}

/// Path and object of a line `MODE TYPE OBJECT<tab>PATH`.
fn tree_entry(entry: &str) -> Option<(&str, &str)> {
    let (about, path) = entry.split_once('\t')?;
    Some((path, about.rsplit_once(' ')?.1))
}

fn is_merge_file(name: &str) -> bool {
    let random = name.strip_prefix(MERGED);
    random.is_some_and(|part| part.len() == 6 && part.chars().all(|c| c.is_ascii_alphanumeric()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_git_are_merge_files() {
        assert!(is_merge_file(".merge_file_1AW4Wq"));
        for name in [".merge_file_", "a/.merge_file_1AW4Wq", ".merge_file_1AW4Wq.rs", "merge"] {
            assert!(!is_merge_file(name), "{name}");
        }
    }

    #[test]
    fn tree_entry_keeps_tabs_of_path() {
        let entry = "100644 blob 0b5a\ta\tb c";
        assert_eq!(tree_entry(entry), Some(("a\tb c", "0b5a")));
    }
}
