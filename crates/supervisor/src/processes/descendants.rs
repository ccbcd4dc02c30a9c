//! Finds and kills all descendants of a process by reading `/proc`. The caller repeats this until
//! its own `wait` reports no children: a listing alone proves nothing.

use std::{
    collections::{BTreeSet, HashMap},
    fs,
};

use rustix::process::{Pid, Signal, kill_process, kill_process_group};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ProcessEntry {
    pid: i32,
    parent: i32,
    group: i32,
}

/// Sends SIGKILL to every descendant of `root` except those `spared`, and to their process groups.
///
/// A signal to a group is atomic with respect to fork, which a listing is not: it catches chains of
/// processes that fork and exit.
pub(crate) fn kill_below(root: Pid, spared: &dyn Fn(i32) -> bool) {
    let table = table();
    let own_group = group_of(&table, rustix::process::getpid().as_raw_nonzero().get());
    let below = below(&table, root.as_raw_nonzero().get(), spared);
    let mut groups = BTreeSet::new();
    for entry in &below {
        if let Some(pid) = Pid::from_raw(entry.pid) {
            let _already_gone = kill_process(pid, Signal::KILL);
        }
        // To the kernel, group 0 is the caller's own and -1 is every process.
        if entry.group > 1
            && entry.group != own_group
            && below.iter().any(|one| one.pid == entry.group)
        {
            groups.insert(entry.group);
        }
    }
    for group in groups.into_iter().filter_map(Pid::from_raw) {
        let _already_gone = kill_process_group(group, Signal::KILL);
    }
}

// Pid 1 of a sandbox was started outside its pid namespace, so inside its group is 0, which
// `getpgrp` of rustix considers impossible.
fn group_of(table: &[ProcessEntry], pid: i32) -> i32 {
    table.iter().find(|entry| entry.pid == pid).map_or(0, |entry| entry.group)
}

fn table() -> Vec<ProcessEntry> {
    let Ok(folder) = fs::read_dir("/proc") else { return Vec::new() };
    folder
        .flatten()
        .filter(|entry| entry.file_name().as_encoded_bytes().iter().all(u8::is_ascii_digit))
        .filter_map(|entry| fs::read(entry.path().join("stat")).ok())
        .filter_map(|stat| parse(&stat))
        .collect()
}

// `pid (name) state ppid pgrp …`; the name may contain spaces and brackets: split at the last
// bracket.
fn parse(stat: &[u8]) -> Option<ProcessEntry> {
    let text = String::from_utf8_lossy(stat);
    let (head, rest) = text.rsplit_once(')')?;
    let pid = head.split_once(' ')?.0.parse().ok()?;
    let mut fields = rest.split_ascii_whitespace().skip(1);
    let parent = fields.next()?.parse().ok()?;
    let group = fields.next()?.parse().ok()?;
    Some(ProcessEntry { pid, parent, group })
}

fn below(table: &[ProcessEntry], root: i32, spared: &dyn Fn(i32) -> bool) -> Vec<ProcessEntry> {
    let mut children: HashMap<i32, Vec<ProcessEntry>> = HashMap::new();
    for entry in table {
        children.entry(entry.parent).or_default().push(*entry);
    }
    let mut found = Vec::new();
    let mut open = vec![root];
    while let Some(parent) = open.pop() {
        for child in children.remove(&parent).unwrap_or_default() {
            if !spared(child.pid) {
                found.push(child);
                open.push(child.pid);
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn process_names_with_brackets_are_parsed() {
        assert_eq!(
            parse(b"42 (a) b) (c) S 7 9 9 0"),
            Some(ProcessEntry { pid: 42, parent: 7, group: 9 })
        );
        assert_eq!(parse(b"garbage"), None);
    }

    #[test]
    fn group_outside_the_namespace_is_zero() {
        let table = [parse(b"7 (supervisor) S 1 0 0").unwrap(), parse(b"8 (sh) S 7 8 8").unwrap()];
        assert_eq!((group_of(&table, 7), group_of(&table, 8), group_of(&table, 9)), (0, 8, 0));
    }

    #[test]
    fn descendants_exclude_spared_branches() {
        let entry = |pid, parent| ProcessEntry { pid, parent, group: pid };
        let table = [entry(2, 1), entry(3, 2), entry(4, 3), entry(5, 2), entry(6, 5), entry(9, 1)];
        let mut found: Vec<i32> =
            below(&table, 2, &|pid| pid == 5).iter().map(|one| one.pid).collect();
        found.sort_unstable();
        assert_eq!(found, [3, 4]);
    }
}
