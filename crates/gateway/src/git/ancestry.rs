//! Whether a pushed commit descends from the one that its branch is at, as the commits at the start
//! of the push's pack prove (gitformat-pack). Git writes commits first, so the proof is usually the
//! first kilobytes of a push, and no object has to be asked for at the remote. Ids are hashes of
//! their objects: a sandbox cannot forge a parent. A descent that the pack does not show counts as
//! unproven, never the other way round.

use std::collections::{HashMap, HashSet};

use flate2::{Decompress, FlushDecompress, Status};
use ring::digest::{SHA1_FOR_LEGACY_USE_ONLY, SHA256, digest};

// Thousands of commits.
const MAX_READ_BYTES: usize = 1 << 20;
const MAX_COMMIT_BYTES: usize = 256 << 10;
// With the bytes that were read, what one push holds in memory. What is inflated a second time,
// because the rest of an object arrived later, counts again: it bounds the work as well.
const MAX_INFLATED_BYTES: usize = 8 << 20;
// Of all commits together.
const MAX_PARENTS: usize = 20_000;
// How much arrives before the pack is read on.
const STEP_BYTES: usize = 16 << 10;

const COMMIT: u8 = 1;
const OFFSET_DELTA: u8 = 6;
const REFERENCE_DELTA: u8 = 7;

/// What the bytes that were read so far say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Descent {
    Proven,
    /// The commits of the pack were read, or cannot be.
    Unproven,
    NeedsMore,
}

/// Reads the commits of a pack as its bytes arrive.
#[derive(Debug)]
pub(super) struct AncestryProof {
    old: String,
    /// The length of the pack from which it is read on.
    due: usize,
    /// The start of the object to be read next.
    at: usize,
    /// The number of objects that follow, once known.
    remaining: Option<u32>,
    inflated: usize,
    /// By their position in the pack.
    commits: HashMap<usize, Vec<u8>>,
    positions: HashMap<String, usize>,
    parents_read: usize,
    /// The parents of the commits that are not reached so far.
    parents: HashMap<String, Vec<String>>,
    /// Where parents lead from the new commit.
    reached: HashSet<String>,
}

/// Why no more commits are read.
#[derive(Debug, PartialEq, Eq)]
enum Stop {
    NeedsMore,
    Over,
}

impl AncestryProof {
    /// For a push that moves a branch from `old` to `new`.
    pub(super) fn new(old: &str, new: &str) -> Self {
        Self {
            old: old.to_owned(),
            due: 0,
            at: 0,
            remaining: None,
            inflated: 0,
            commits: HashMap::new(),
            positions: HashMap::new(),
            parents_read: 0,
            parents: HashMap::new(),
            reached: HashSet::from([new.to_owned()]),
        }
    }

    /// Whether enough of the pack has arrived to read on.
    pub(super) fn is_due(&self, length: usize) -> bool {
        length >= self.due
    }

    /// Reads on in the pack, whose first bytes are these.
    pub(super) fn read(&mut self, pack: &[u8]) -> Descent {
        self.due = pack.len() + STEP_BYTES;
        loop {
            match self.next_commit(pack) {
                Ok(()) if self.reached.contains(&self.old) => return Descent::Proven,
                Ok(()) => {}
                Err(Stop::NeedsMore) if pack.len() < MAX_READ_BYTES => return Descent::NeedsMore,
                Err(_) => return Descent::Unproven,
            }
        }
    }

    /// Reads one commit.
    fn next_commit(&mut self, pack: &[u8]) -> Result<(), Stop> {
        let remaining = match self.remaining {
            Some(remaining) => remaining,
            None => {
                let header: [u8; 12] =
                    pack.get(..12).ok_or(Stop::NeedsMore)?.try_into().map_err(|_| Stop::Over)?;
                if !header.starts_with(b"PACK") {
                    return Err(Stop::Over);
                }
                self.at = header.len();
                let count = [header[8], header[9], header[10], header[11]];
                *self.remaining.insert(u32::from_be_bytes(count))
            }
        };
        if remaining == 0 {
            return Err(Stop::Over);
        }
        let (content, end) = self.content(pack)?;
        let id = self.id_of(&content);
        let left = MAX_PARENTS.checked_sub(self.parents_read).ok_or(Stop::Over)?;
        let parents = parents_of(&content, self.old.len()).take(left + 1);
        let parents: Vec<String> = parents.collect();
        self.parents_read += parents.len();
        self.positions.insert(id.clone(), self.at);
        self.commits.insert(self.at, content);
        (self.at, self.remaining) = (end, Some(remaining - 1));
        self.add(id, parents);
        Ok(())
    }

    /// Adds a commit. Each one is followed once, when it is reached.
    fn add(&mut self, id: String, parents: Vec<String>) {
        let is_reached = self.reached.contains(&id);
        self.parents.insert(id.clone(), parents);
        let mut next = if is_reached { vec![id] } else { Vec::new() };
        while let Some(id) = next.pop() {
            for parent in self.parents.remove(&id).unwrap_or_default() {
                if self.reached.insert(parent.clone()) {
                    next.push(parent);
                }
            }
        }
    }

    /// The commit at the present position, and where the next object starts.
    fn content(&mut self, pack: &[u8]) -> Result<(Vec<u8>, usize), Stop> {
        let mut cursor = Cursor::new(pack, self.at);
        let (kind, size) = cursor.header()?;
        let base = match kind {
            COMMIT => None,
            OFFSET_DELTA => {
                let distance = cursor.distance()?;
                Some(self.at.checked_sub(distance).ok_or(Stop::Over)?)
            }
            REFERENCE_DELTA => {
                let id = hex(cursor.take(self.old.len() / 2)?);
                Some(*self.positions.get(&id).ok_or(Stop::Over)?)
            }
            _ => return Err(Stop::Over),
        };
        let data = cursor.inflate(size);
        self.inflated += cursor.inflated;
        if self.inflated > MAX_INFLATED_BYTES {
            return Err(Stop::Over);
        }
        let Some(base) = base else { return Ok((data?, cursor.at)) };
        // Of another object than a commit: no commit either.
        let content = apply(self.commits.get(&base).ok_or(Stop::Over)?, &data?)?;
        self.inflated += content.len();
        Ok((content, cursor.at))
    }

    fn id_of(&self, content: &[u8]) -> String {
        let algorithm = if self.old.len() == 64 { &SHA256 } else { &SHA1_FOR_LEGACY_USE_ONLY };
        let object = [format!("commit {}\0", content.len()).as_bytes(), content].concat();
        hex(digest(algorithm, &object).as_ref())
    }
}

/// The parents of a commit, read as git reads them: lines after that of the tree. Git reads no
/// commit with one that is not an id, and here they end before it.
fn parents_of(commit: &[u8], id_length: usize) -> impl Iterator<Item = String> {
    let lines = commit.split(|byte| *byte == b'\n').skip(1);
    let parents = lines.map_while(|line| line.strip_prefix(b"parent "));
    let is_id = move |id: &&[u8]| {
        id.len() == id_length && id.iter().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
    };
    parents.take_while(is_id).map(|id| String::from_utf8_lossy(id).into_owned())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A position in a pack or in a delta.
#[derive(Debug)]
struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
    /// How many bytes were made, also of an object that is not complete.
    inflated: usize,
}

impl<'a> Cursor<'a> {
    const fn new(bytes: &'a [u8], at: usize) -> Self {
        Self { bytes, at, inflated: 0 }
    }

    fn byte(&mut self) -> Result<u8, Stop> {
        let byte = *self.bytes.get(self.at).ok_or(Stop::NeedsMore)?;
        self.at += 1;
        Ok(byte)
    }

    fn take(&mut self, count: usize) -> Result<&'a [u8], Stop> {
        let end = self.at.checked_add(count).ok_or(Stop::Over)?;
        let taken = self.bytes.get(self.at..end).ok_or(Stop::NeedsMore)?;
        self.at = end;
        Ok(taken)
    }

    /// Type and size of an object.
    fn header(&mut self) -> Result<(u8, usize), Stop> {
        let first = self.byte()?;
        let mut size = usize::from(first & 0x0f);
        if first & 0x80 != 0 {
            let more = self.size()?;
            size |= more.checked_mul(16).ok_or(Stop::Over)?;
        }
        if size > MAX_COMMIT_BYTES {
            return Err(Stop::Over);
        }
        Ok((first >> 4 & 0x07, size))
    }

    /// A number of seven bits each byte, the lowest ones first.
    fn size(&mut self) -> Result<usize, Stop> {
        let (mut size, mut shift) = (0, 0);
        loop {
            let byte = self.byte()?;
            if shift > 28 {
                return Err(Stop::Over);
            }
            size |= usize::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Ok(size);
            }
            shift += 7;
        }
    }

    /// How far before this object its base starts.
    fn distance(&mut self) -> Result<usize, Stop> {
        let mut byte = self.byte()?;
        let mut distance = usize::from(byte & 0x7f);
        while byte & 0x80 != 0 {
            byte = self.byte()?;
            let next = distance.checked_add(1).and_then(|one| one.checked_mul(128));
            distance = next.ok_or(Stop::Over)? | usize::from(byte & 0x7f);
        }
        Ok(distance)
    }

    fn inflate(&mut self, size: usize) -> Result<Vec<u8>, Stop> {
        let mut inflater = Decompress::new(true);
        // One byte more than announced, so that a longer stream is noticed.
        let mut data = Vec::with_capacity(size + 1);
        loop {
            let before = (inflater.total_in(), inflater.total_out());
            let used = usize::try_from(before.0).map_err(|_| Stop::Over)?;
            let input = self.bytes.get(self.at + used..).unwrap_or_default();
            let status = inflater.decompress_vec(input, &mut data, FlushDecompress::None);
            self.inflated = data.len();
            match status.map_err(|_| Stop::Over)? {
                Status::StreamEnd if data.len() == size => {
                    self.at += usize::try_from(inflater.total_in()).map_err(|_| Stop::Over)?;
                    return Ok(data);
                }
                Status::StreamEnd => return Err(Stop::Over),
                _ if data.len() > size => return Err(Stop::Over),
                _ if before == (inflater.total_in(), inflater.total_out()) => {
                    return Err(Stop::NeedsMore);
                }
                _ => {}
            }
        }
    }
}

/// The object that a delta makes of its base.
fn apply(base: &[u8], delta: &[u8]) -> Result<Vec<u8>, Stop> {
    // A delta is complete: it never needs more.
    let over = |_| Stop::Over;
    let mut cursor = Cursor::new(delta, 0);
    let (from, size) = (cursor.size().map_err(over)?, cursor.size().map_err(over)?);
    if from != base.len() || size > MAX_COMMIT_BYTES {
        return Err(Stop::Over);
    }
    let mut made = Vec::with_capacity(size);
    while cursor.at < delta.len() {
        let step = cursor.byte().map_err(over)?;
        let piece = if step & 0x80 == 0 {
            cursor.take(usize::from(step)).map_err(over)?
        } else {
            let mut number = |bits: std::ops::Range<u8>| {
                let mut number = 0;
                for (place, bit) in bits.enumerate() {
                    if step & 1 << bit != 0 {
                        number |= usize::from(cursor.byte().map_err(over)?) << (8 * place);
                    }
                }
                Ok(number)
            };
            let (offset, count) = (number(0..4)?, number(4..7)?);
            let count = if count == 0 { 0x10000 } else { count };
            let end = offset.checked_add(count).ok_or(Stop::Over)?;
            base.get(offset..end).ok_or(Stop::Over)?
        };
        // Zero is reserved.
        if step == 0 || made.len() + piece.len() > size {
            return Err(Stop::Over);
        }
        made.extend_from_slice(piece);
    }
    if made.len() == size { Ok(made) } else { Err(Stop::Over) }
}

#[cfg(test)]
mod tests {
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
        let arguments =
            ["pack-objects", "--revs", "--stdout", "-q", "--thin", "--delta-base-offset"];
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
}
