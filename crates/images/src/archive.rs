//! Reads a tar archive as a stream: old, ustar, GNU and pax headers, long names, all four sparse
//! formats. Trusts nothing in the archive and keeps little of it in memory. `write` writes one;
//! `unpack` writes its content to the disk.

mod compression;
mod header;
mod pax;
mod sparse;
mod write;

use std::io::{self, Read};

pub(crate) use compression::decompressed;
pub(crate) use header::EntryKind;
use header::{BLOCK, Header, parse_text};
use pax::Pax;
pub(crate) use sparse::Extent;
pub(crate) use write::ArchiveWriter;

// Long names, attributes and sparse maps of real archives need kilobytes.
const MAX_EXTENSION_BYTES: u64 = 1 << 20;

/// Why a stream cannot be read as an archive.
#[derive(Debug, thiserror::Error)]
pub enum ArchiveError {
    /// The stream cannot be read or decompressed.
    #[error("the archive cannot be read")]
    Read(#[source] io::Error),
    /// The stream ends before the archive does.
    #[error("the archive is truncated: its end marker is missing")]
    Truncated,
    /// A header's checksum is wrong.
    #[error("the archive is damaged or not a tar: wrong checksum of the header at byte {at}")]
    Checksum { at: u64 },
    /// A header is invalid.
    #[error("invalid header at byte {at}: {reason}")]
    Header { at: u64, reason: &'static str },
    /// The compression is not supported.
    #[error("the archive is compressed with {0}; only gzip and zstd are supported")]
    Compression(&'static str),
}

/// One entry of an archive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Entry {
    /// The path as the archive has it: neither checked nor normalized.
    pub(crate) path: Vec<u8>,
    pub(crate) kind: EntryKind,
    /// Permissions, with the set-id and sticky bits.
    pub(crate) mode: u32,
    pub(crate) uid: u64,
    pub(crate) gid: u64,
    /// Seconds and nanoseconds since the epoch.
    pub(crate) modified: (i64, u32),
    /// The target of a hard or symbolic link.
    pub(crate) link: Vec<u8>,
    /// The file's size, holes included.
    pub(crate) size: u64,
    /// Where the stored bytes belong in the file.
    pub(crate) extents: Vec<Extent>,
    /// The value of `security.capability`.
    pub(crate) capability: Option<Vec<u8>>,
    /// All other extended attributes, by name.
    pub(crate) attributes: Vec<(Vec<u8>, Vec<u8>)>,
}

impl Entry {
    /// An entry of root's without content.
    pub(crate) fn at(path: &[u8], kind: EntryKind) -> Self {
        Self {
            path: path.to_vec(),
            kind,
            mode: 0,
            uid: 0,
            gid: 0,
            modified: (0, 0),
            link: Vec::new(),
            size: 0,
            extents: Vec::new(),
            capability: None,
            attributes: Vec::new(),
        }
    }
}

/// Reads an archive entry by entry.
pub(crate) struct Archive<R> {
    source: R,
    /// Bytes read so far.
    at: u64,
    /// Stored bytes of the current entry that have not been read yet.
    data: u64,
    /// Bytes that fill the current entry's last block.
    padding: u64,
}

/// Values that precede a header and override its fields.
#[derive(Default)]
struct Extensions {
    path: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    pax: Pax,
}

impl<R: Read> Archive<R> {
    pub(crate) fn new(source: R) -> Self {
        Self { source, at: 0, data: 0, padding: 0 }
    }

    /// Bytes of the archive read so far.
    pub(crate) fn position(&self) -> u64 {
        self.at
    }

    /// The source, positioned after the archive's end, and the number of bytes read from it.
    pub(crate) fn into_rest(self) -> (R, u64) {
        (self.source, self.at)
    }

    /// The next entry. Skips the unread rest of the current one.
    pub(crate) fn next(&mut self) -> Result<Option<Entry>, ArchiveError> {
        let mut extensions = Extensions::default();
        loop {
            self.skip()?;
            let begin = self.at;
            let wrong = |reason| ArchiveError::Header { at: begin, reason };
            let block = self.block()?;
            if block.iter().all(|byte| *byte == 0) {
                return Ok(None);
            }
            let header = Header::parse(&block, begin)?;
            match header.flag {
                b'L' => extensions.path = Some(self.long_name(&header, begin)?),
                b'K' => extensions.link = Some(self.long_name(&header, begin)?),
                b'x' | b'X' => {
                    let bytes = self.extension(&header, begin)?;
                    extensions.pax = Pax::parse(&bytes).map_err(wrong)?;
                }
                // Global pax headers hold only comments in practice; `V` is a volume label.
                b'g' | b'V' => self.expect(header.size, begin)?,
                _ => return self.entry(&block, header, extensions, begin).map(Some),
            }
        }
    }

    /// Reads stored bytes of the current entry; 0 at their end.
    pub(crate) fn read(&mut self, buffer: &mut [u8]) -> Result<usize, ArchiveError> {
        let wanted = usize::try_from(self.data).unwrap_or(usize::MAX).min(buffer.len());
        if wanted == 0 {
            return Ok(0);
        }
        let length =
            read_some(&mut self.source, &mut buffer[..wanted]).map_err(ArchiveError::Read)?;
        if length == 0 {
            return Err(ArchiveError::Truncated);
        }
        (self.at, self.data) = (self.at + length as u64, self.data - length as u64);
        Ok(length)
    }

    fn entry(
        &mut self,
        block: &[u8; BLOCK],
        header: Header,
        extensions: Extensions,
        begin: u64,
    ) -> Result<Entry, ArchiveError> {
        let wrong = |reason| ArchiveError::Header { at: begin, reason };
        let pax = extensions.pax;
        let mut path = pax.path.or(extensions.path).unwrap_or(header.path);
        let kind =
            EntryKind::of(header.flag, &path).ok_or_else(|| wrong("unsupported entry type"))?;
        // Some writers give a link the size of its target, although no content follows.
        let stored = if kind == EntryKind::File { pax.size.unwrap_or(header.size) } else { 0 };
        self.expect(stored, begin)?;
        let mut size = stored;
        let mut extents = vec![Extent { offset: 0, length: stored }];
        if header.flag == b'S' {
            // The map of an old sparse file continues after its header, outside its content.
            let more = &mut || self.block();
            (extents, size) = sparse::header_map(block, more)?
                .ok_or_else(|| wrong("its sparse map is malformed"))?;
        } else if let Some(map) = pax.sparse.filter(|_| kind == EntryKind::File) {
            path = map.name.clone().unwrap_or(path);
            size = map.size.ok_or_else(|| wrong("the size of the sparse file is missing"))?;
            extents = match map.extents() {
                Some(extents) => extents,
                None => sparse::content_map(&mut || self.leading_block(begin))?
                    .ok_or_else(|| wrong("its sparse map is malformed"))?,
            };
        }
        if !sparse::fits(&extents, self.data, size) {
            return Err(wrong("its sparse map does not match its content"));
        }
        Ok(Entry {
            path,
            kind,
            mode: header.mode & 0o7777,
            uid: pax.uid.unwrap_or(header.uid),
            gid: pax.gid.unwrap_or(header.gid),
            modified: pax.modified.unwrap_or((header.modified, 0)),
            link: pax.link.or(extensions.link).unwrap_or(header.link),
            size,
            extents,
            capability: pax.capability,
            attributes: pax.attributes,
        })
    }

    fn long_name(&mut self, header: &Header, begin: u64) -> Result<Vec<u8>, ArchiveError> {
        self.extension(header, begin).map(|bytes| parse_text(&bytes))
    }

    fn extension(&mut self, header: &Header, begin: u64) -> Result<Vec<u8>, ArchiveError> {
        if header.size > MAX_EXTENSION_BYTES {
            return Err(ArchiveError::Header { at: begin, reason: "it is larger than a megabyte" });
        }
        self.expect(header.size, begin)?;
        let mut bytes = Vec::new();
        let mut buffer = [0; BLOCK];
        loop {
            match self.read(&mut buffer)? {
                0 => return Ok(bytes),
                length => bytes.extend_from_slice(&buffer[..length]),
            }
        }
    }

    fn expect(&mut self, stored: u64, begin: u64) -> Result<(), ArchiveError> {
        let padding = stored.wrapping_neg() % BLOCK as u64;
        if stored > i64::MAX as u64 {
            return Err(ArchiveError::Header { at: begin, reason: "its size is too large" });
        }
        (self.data, self.padding) = (stored, padding);
        Ok(())
    }

    // The map of a sparse file in format 1.0 is the first part of its content.
    fn leading_block(&mut self, begin: u64) -> Result<[u8; BLOCK], ArchiveError> {
        if self.data < BLOCK as u64 {
            return Err(ArchiveError::Header { at: begin, reason: "its sparse map has no end" });
        }
        self.data -= BLOCK as u64;
        self.block()
    }

    fn skip(&mut self) -> Result<(), ArchiveError> {
        self.data += std::mem::take(&mut self.padding);
        let mut buffer = [0; 16 * BLOCK];
        while self.read(&mut buffer)? > 0 {}
        Ok(())
    }

    fn block(&mut self) -> Result<[u8; BLOCK], ArchiveError> {
        let mut block = Vec::with_capacity(BLOCK);
        let mut source = (&mut self.source).take(BLOCK as u64);
        source.read_to_end(&mut block).map_err(ArchiveError::Read)?;
        self.at += block.len() as u64;
        block.try_into().map_err(|_| ArchiveError::Truncated)
    }
}

/// Reads once; retries when a signal interrupts the read.
pub(crate) fn read_some(source: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    loop {
        match source.read(buffer) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => return other,
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
