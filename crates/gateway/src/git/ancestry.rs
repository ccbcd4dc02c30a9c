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
mod tests;
