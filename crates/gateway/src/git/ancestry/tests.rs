//! Descents of packs that git writes, and of hostile ones.

use std::{io::Write as _, process::Command};

use proptest::prelude::*;

use super::*;

/// A repository with commits in a row, and its folder.
struct History {
    folder: tempfile::TempDir,
    commits: Vec<String>,
}

fn git(folder: &std::path::Path, arguments: &[&str], input: &str) -> Vec<u8> {
    let mut child = Command::new("git")
        .args(["-c", "user.name=T", "-c", "user.email=t@example.org"])
        .args(arguments)
        .current_dir(folder)
        .envs([("GIT_CONFIG_GLOBAL", "/dev/null"), ("GIT_CONFIG_NOSYSTEM", "1")])
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {output:?}");
    output.stdout
}

fn history(count: usize) -> History {
    let folder = tempfile::tempdir().unwrap();
    git(folder.path(), &["init", "-q", "-b", "main"], "");
    let mut commits = Vec::new();
    for number in 0..count {
        // Long and alike, so that git stores deltas.
        let message = format!("{}{number}", "the same words again and again\n".repeat(40));
        git(folder.path(), &["commit", "-q", "--allow-empty", "-F", "-"], &message);
        let id = git(folder.path(), &["rev-parse", "HEAD"], "");
        commits.push(String::from_utf8(id).unwrap().trim().to_owned());
    }
    History { folder, commits }
}

/// The pack of a push.
fn pack(history: &History, new: &str, old: &str) -> Vec<u8> {
    let arguments = ["pack-objects", "--revs", "--stdout", "-q", "--thin", "--delta-base-offset"];
    git(history.folder.path(), &arguments, &format!("{new}\n^{old}\n"))
}

#[test]
fn pack_of_git_proves_a_descent() {
    let history = history(40);
    let (old, new) = (&history.commits[0], &history.commits[39]);
    let pack = pack(&history, new, old);
    assert_eq!(AncestryProof::new(old, new).read(&pack), Descent::Proven);
    let deltas = |kind: u8| pack.iter().any(|byte| byte >> 4 & 7 == kind);
    assert!(deltas(OFFSET_DELTA), "the pack has deltas");
    // As it arrives.
    let mut proof = AncestryProof::new(old, new);
    let mut read = (1..=pack.len()).map(|end| proof.read(&pack[..end]));
    assert_eq!(read.find(|descent| *descent != Descent::NeedsMore), Some(Descent::Proven));
}

#[test]
fn other_histories_prove_nothing() {
    let history = history(4);
    let [first, second, third, fourth] = &history.commits[..] else { panic!() };
    let pack = pack(&history, fourth, second);
    for (old, new) in [(fourth, third), (first, fourth), (&"0".repeat(40), fourth)] {
        assert_eq!(AncestryProof::new(old, new).read(&pack), Descent::Unproven, "{old} {new}");
    }
    assert_eq!(AncestryProof::new(second, fourth).read(&pack), Descent::Proven);
    assert_eq!(AncestryProof::new(second, fourth).read(b"PACK"), Descent::NeedsMore);
    assert_eq!(AncestryProof::new(second, fourth).read(b"<html></html>"), Descent::Unproven);
}

#[test]
fn commit_under_another_id_is_not_believed() {
    let (old, new) = ("1".repeat(40), "2".repeat(40));
    let content = format!("tree {old}\nparent {old}\nauthor x\n\nx");
    assert_eq!(AncestryProof::new(&old, &new).read(&pack_of(&[content])), Descent::Unproven);
}

/// A pack with these commits as whole objects.
fn pack_of(commits: &[String]) -> Vec<u8> {
    let mut pack = b"PACK\0\0\0\x02".to_vec();
    pack.extend(u32::try_from(commits.len()).unwrap().to_be_bytes());
    for commit in commits {
        let mut rest = commit.len() >> 4;
        pack.push(0x80 | COMMIT << 4 | (commit.len() & 15) as u8);
        while rest > 0x7f {
            pack.push(0x80 | (rest & 0x7f) as u8);
            rest >>= 7;
        }
        pack.push(rest as u8);
        let level = flate2::Compression::best();
        let mut encoder = flate2::write::ZlibEncoder::new(&mut pack, level);
        encoder.write_all(commit.as_bytes()).unwrap();
        encoder.finish().unwrap();
    }
    pack
}

#[test]
fn each_commit_is_followed_once() {
    let (old, tree) = ("1".repeat(40), "3".repeat(40));
    // A merge of everything, and children of the old commit beside it.
    let parents: String = (0..15_000).map(|one| format!("parent {one:040x}\n")).collect();
    let mut commits = vec![format!("tree {tree}\n{}\n", &parents[..48 * 4_000])];
    let child = |one| format!("tree {tree}\nparent {old}\n\n{one}");
    commits.extend((0..3_000).map(child));
    let new = AncestryProof::new(&old, &old).id_of(commits[0].as_bytes());
    let mut proof = AncestryProof::new(&old, &new);
    assert_eq!(proof.read(&pack_of(&commits)), Descent::Unproven);
    assert_eq!(proof.reached.len(), 4_001);
    assert!(!proof.parents.contains_key(&new) && proof.parents.len() == 3_000);
}

#[test]
fn number_of_parents_is_bounded() {
    let (old, tree) = ("1".repeat(40), "3".repeat(40));
    let parents: String = (0..5_000).map(|one| format!("parent {one:040x}\n")).collect();
    let commits: Vec<_> = (0..20).map(|one| format!("tree {tree}\n{parents}\n{one}")).collect();
    let mut proof = AncestryProof::new(&old, &"2".repeat(40));
    assert_eq!(proof.read(&pack_of(&commits)), Descent::Unproven);
    assert_eq!(proof.commits.len(), 5, "it stops at the limit");
}

#[test]
fn parents_that_are_no_ids_end_the_list() {
    let id = "a".repeat(40);
    for other in ["0001", &"A".repeat(40), &"a".repeat(64), ""] {
        let commit = format!("tree {id}\nparent {id}\nparent {other}\nparent {id}\n\nx");
        let parents: Vec<_> = parents_of(commit.as_bytes(), 40).collect();
        assert_eq!(parents, [id.as_str()], "{other}");
    }
}

#[test]
fn small_pieces_are_not_inflated_each_time() {
    let old = "1".repeat(40);
    // Hexadecimal digits without a pattern: half as long in the pack.
    let words = (0u32..6_000).map(|one| hex(digest(&SHA256, &one.to_be_bytes()).as_ref()));
    let text: String = words.take(3_500).collect();
    let commit = format!("tree {old}\nparent {old}\n\n{text}");
    let new = AncestryProof::new(&old, &old).id_of(commit.as_bytes());
    let pack = pack_of(std::slice::from_ref(&commit));
    let mut proof = AncestryProof::new(&old, &new);
    let due = (1..=pack.len())
        .filter(|end| proof.is_due(*end) && proof.read(&pack[..*end]) == Descent::NeedsMore);
    assert_eq!(due.count(), pack.len().div_ceil(STEP_BYTES));
    assert_eq!(proof.read(&pack), Descent::Proven);
    assert!(proof.inflated < 6 * commit.len(), "{}", proof.inflated);
    // Reading at every byte comes to the limit.
    let mut proof = AncestryProof::new(&old, &new);
    let mut read = (1..=pack.len()).map(|end| proof.read(&pack[..end]));
    let last = read.find(|descent| *descent != Descent::NeedsMore);
    assert_eq!(last, Some(Descent::Unproven));
    assert!(proof.inflated <= MAX_INFLATED_BYTES + MAX_COMMIT_BYTES);
}

#[test]
fn memory_for_commits_is_bounded() {
    let (old, new) = ("1".repeat(40), "2".repeat(40));
    // Each about as large as allowed, and small in the pack.
    let size = MAX_COMMIT_BYTES - 16;
    let header = [0x80 | COMMIT << 4, 0xff, 0x7f];
    let mut pack = b"PACK\0\0\0\x02\0\0\x01\0".to_vec();
    for _ in 0..256 {
        pack.extend(header);
        let level = flate2::Compression::best();
        let mut encoder = flate2::write::ZlibEncoder::new(&mut pack, level);
        encoder.write_all(&vec![b'x'; size]).unwrap();
        encoder.finish().unwrap();
    }
    let mut proof = AncestryProof::new(&old, &new);
    assert_eq!(proof.read(&pack), Descent::Unproven);
    assert_eq!(proof.commits.len(), MAX_INFLATED_BYTES / size, "it stops at the limit");
}

proptest! {
    #[test]
    fn any_bytes_are_read_without_panic(
        bytes in prop::collection::vec(any::<u8>(), 0..300),
        count in any::<u8>(),
    ) {
        let (old, new) = ("1".repeat(40), "2".repeat(40));
        let pack = [&b"PACK\0\0\0\x02\0\0\0"[..], &[count], &bytes].concat();
        prop_assert_ne!(AncestryProof::new(&old, &new).read(&pack), Descent::Proven);
        let _ = apply(&bytes, &bytes);
    }
}
