//! Writes a tar archive as a stream: pax headers with times in nanoseconds, long names and extended
//! attributes, and sparse files in GNU's format 1.0. The reader of this folder and GNU tar read it.
//! Does not decide what goes into an archive.

use std::{
    fs::File,
    io::{self, Read, Write},
    os::unix::fs::FileExt,
};

use super::{Entry, EntryKind, header::BLOCK, sparse::Extent};

const CAPABILITY: &[u8] = b"security.capability";

/// Writes an archive entry by entry.
pub(crate) struct ArchiveWriter<W> {
    out: W,
    buffer: Vec<u8>,
}

impl<W: Write> ArchiveWriter<W> {
    pub(crate) fn new(out: W) -> Self {
        Self { out, buffer: vec![0; 1 << 16] }
    }

    /// Writes an entry without content.
    pub(crate) fn bare(&mut self, entry: &Entry) -> io::Result<()> {
        self.headers(entry, &[], &entry.path, 0)
    }

    /// Writes a file with this content; the entry's size and extents are not used.
    pub(crate) fn bytes(&mut self, entry: &Entry, content: &[u8]) -> io::Result<()> {
        self.headers(entry, &[], &entry.path, content.len() as u64)?;
        self.out.write_all(content)?;
        self.pad(content.len() as u64)
    }

    /// Writes a file's stored bytes: the entry's extents, which leave out holes.
    pub(crate) fn stored(&mut self, entry: &Entry, file: &File) -> io::Result<()> {
        let data: u64 = entry.extents.iter().map(|extent| extent.length).sum();
        if data == entry.size {
            self.headers(entry, &[], &entry.path, data)?;
        } else {
            let map = sparse_map(&entry.extents);
            let sparse = [
                record("GNU.sparse.major", b"1"),
                record("GNU.sparse.minor", b"0"),
                record("GNU.sparse.name", &entry.path),
                record("GNU.sparse.realsize", entry.size.to_string().as_bytes()),
            ];
            let stored = map.len() as u64 + data;
            self.headers(entry, &sparse.concat(), b"GNUSparseFile.0", stored)?;
            self.out.write_all(&map)?;
        }
        for extent in &entry.extents {
            self.extent(file, *extent)?;
        }
        self.pad(data)
    }

    /// Writes the end marker and returns the stream.
    pub(crate) fn finish(mut self) -> io::Result<W> {
        self.out.write_all(&[0; 2 * BLOCK])?;
        Ok(self.out)
    }

    fn extent(&mut self, file: &File, extent: Extent) -> io::Result<()> {
        let (mut at, end) = (extent.offset, extent.offset + extent.length);
        while at < end {
            let wanted = usize::try_from(end - at).unwrap_or(usize::MAX).min(self.buffer.len());
            match file.read_at(&mut self.buffer[..wanted], at)? {
                0 => return Err(io::Error::other("the file became shorter while it was read")),
                length => {
                    self.out.write_all(&self.buffer[..length])?;
                    at += length as u64;
                }
            }
        }
        Ok(())
    }

    /// Writes the pax header of an entry and the header itself. `name` is for readers that do not
    /// know sparse files; for others it is the path.
    fn headers(&mut self, entry: &Entry, more: &[u8], name: &[u8], size: u64) -> io::Result<()> {
        let (seconds, nanos) = entry.modified;
        let mut records = record("mtime", time(seconds, nanos).as_bytes());
        let mut add = |key: &str, value: &[u8]| records.extend(record(key, value));
        if name.len() > 100 {
            add("path", name);
        }
        if entry.link.len() > 100 {
            add("linkpath", &entry.link);
        }
        for (key, number) in [("uid", entry.uid), ("gid", entry.gid), ("size", size)] {
            let octal_digits = if key == "size" { 11 } else { 7 };
            if number >= 1 << (3 * octal_digits) {
                add(key, number.to_string().as_bytes());
            }
        }
        let capability = entry.capability.iter().map(|value| (CAPABILITY, value));
        let attributes = entry.attributes.iter().map(|(key, value)| (key.as_slice(), value));
        for (key, value) in capability.chain(attributes) {
            records.extend(record_of_bytes(&[b"SCHILY.xattr.", key].concat(), value));
        }
        records.extend_from_slice(more);
        let pax = header(b"PaxHeaders/entry", b'x', 0o644, [0, 0], records.len() as u64, b"", 0);
        self.out.write_all(&pax)?;
        self.out.write_all(&records)?;
        self.pad(records.len() as u64)?;
        let flag = match entry.kind {
            EntryKind::File => b'0',
            EntryKind::HardLink => b'1',
            EntryKind::Symlink => b'2',
            EntryKind::Device => b'3',
            EntryKind::Folder => b'5',
            EntryKind::Fifo => b'6',
        };
        let owner = [entry.uid, entry.gid];
        self.out.write_all(&header(name, flag, entry.mode, owner, size, &entry.link, seconds))
    }

    fn pad(&mut self, written: u64) -> io::Result<()> {
        let rest = written.wrapping_neg() % BLOCK as u64;
        io::copy(&mut io::repeat(0).take(rest), &mut self.out).map(drop)
    }
}

/// A header block. Values that do not fit are in the pax header before it.
fn header(
    name: &[u8],
    flag: u8,
    mode: u32,
    owner: [u64; 2],
    size: u64,
    link: &[u8],
    seconds: i64,
) -> [u8; BLOCK] {
    let mut block = [0; BLOCK];
    let mut put = |at: usize, bytes: &[u8]| block[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &name[..name.len().min(100)]);
    put(157, &link[..link.len().min(100)]);
    let octal = |value: u64, digits: u32| {
        let fits = if value < 1 << (3 * digits) { value } else { 0 };
        format!("{fits:0width$o}", width = digits as usize).into_bytes()
    };
    put(100, &octal(u64::from(mode), 7));
    put(108, &octal(owner[0], 7));
    put(116, &octal(owner[1], 7));
    put(124, &octal(size, 11));
    put(136, &octal(u64::try_from(seconds).unwrap_or(0), 11));
    put(148, b"        ");
    put(156, &[flag]);
    put(257, b"ustar\x0000");
    if flag == b'3' {
        put(329, b"0000000");
        put(337, b"0000000");
    }
    let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    block
}

/// A record `length key=value`, where the length counts its own digits.
fn record(key: &str, value: &[u8]) -> Vec<u8> {
    record_of_bytes(key.as_bytes(), value)
}

fn record_of_bytes(key: &[u8], value: &[u8]) -> Vec<u8> {
    let rest = key.len() + value.len() + 3;
    let mut length = rest + 1;
    while rest + length.to_string().len() != length {
        length = rest + length.to_string().len();
    }
    [length.to_string().as_bytes(), b" ", key, b"=", value, b"\n"].concat()
}

// `-12.5` is 12.5 seconds before the epoch.
fn time(seconds: i64, nanos: u32) -> String {
    match (seconds < 0, nanos) {
        (_, 0) => seconds.to_string(),
        (false, _) => format!("{seconds}.{nanos:09}"),
        (true, _) => {
            let whole = (seconds + 1).unsigned_abs();
            format!("-{whole}.{:09}", 1_000_000_000 - nanos)
        }
    }
}

/// The map in front of a sparse file's content, in whole blocks.
fn sparse_map(extents: &[Extent]) -> Vec<u8> {
    let mut map = format!("{}\n", extents.len()).into_bytes();
    for extent in extents {
        map.extend(format!("{}\n{}\n", extent.offset, extent.length).into_bytes());
    }
    map.resize(map.len().next_multiple_of(BLOCK), 0);
    map
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::archive::Archive;

    fn entry(path: &[u8], kind: EntryKind) -> Entry {
        Entry {
            mode: 0o4751,
            uid: 7,
            gid: 3_000_000,
            modified: (1_700_000_000, 123_456_789),
            extents: vec![Extent { offset: 0, length: 0 }],
            ..Entry::at(path, kind)
        }
    }

    proptest! {
        #[test]
        fn reader_returns_what_was_written(
            path in "[a-z./\u{e4}]{1,300}[a-z]",
            seconds in -4_000_000_000i64..10_000_000_000,
            nanos in 0u32..1_000_000_000,
            value in prop::collection::vec(any::<u8>(), 0..2000),
            content in prop::collection::vec(any::<u8>(), 0..2000),
        ) {
            let written = Entry {
                modified: (seconds, nanos),
                attributes: vec![(b"user.x".to_vec(), value)],
                size: content.len() as u64,
                extents: vec![Extent { offset: 0, length: content.len() as u64 }],
                ..entry(path.as_bytes(), EntryKind::File)
            };
            let mut writer = ArchiveWriter::new(Vec::new());
            writer.bytes(&written, &content).unwrap();
            let link = Entry {
                link: [b"to/".as_slice(), path.as_bytes()].concat(),
                ..entry(b"link", EntryKind::HardLink)
            };
            writer.bare(&link).unwrap();
            let archive = writer.finish().unwrap();
            let mut reader = Archive::new(archive.as_slice());
            prop_assert_eq!(reader.next().unwrap(), Some(written));
            let mut read = vec![0; content.len()];
            let mut at = 0;
            while at < read.len() {
                at += reader.read(&mut read[at..]).unwrap();
            }
            prop_assert_eq!(read, content);
            prop_assert_eq!(reader.next().unwrap(), Some(link));
            prop_assert_eq!(reader.next().unwrap(), None);
        }
    }

    #[test]
    fn holes_are_not_written() {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(b"abc", 1 << 30).unwrap();
        file.set_len(1 << 40).unwrap();
        let written = Entry {
            size: 1 << 40,
            extents: vec![Extent { offset: 1 << 30, length: 3 }],
            ..entry(b"sparse", EntryKind::File)
        };
        let mut writer = ArchiveWriter::new(Vec::new());
        writer.stored(&written, &file).unwrap();
        let archive = writer.finish().unwrap();
        assert!(archive.len() < 8192, "{}", archive.len());
        let mut reader = Archive::new(archive.as_slice());
        assert_eq!(reader.next().unwrap(), Some(written));
        let mut read = [0; 9];
        assert_eq!(reader.read(&mut read).unwrap(), 3);
        assert_eq!(&read[..3], b"abc");
        assert_eq!(reader.next().unwrap(), None);
    }
}
