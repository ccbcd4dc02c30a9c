//! Reads a tar as a stream: old, ustar, GNU and pax headers, long names, every kind of sparse file.
//! Trusts nothing in it and holds little of it in memory. Writes nothing; see `unpack`.

mod compression;
mod header;
mod pax;
mod sparse;

use std::io::{self, Read};

pub(crate) use compression::decompressed;
pub(crate) use header::Kind;
use header::{BLOCK, Header, parse_text};
use pax::Pax;
pub(crate) use sparse::Extent;

// Long names, attributes and maps of honest archives need kilobytes.
const MAX_EXTENSION_BYTES: u64 = 1 << 20;

/// Why a stream is no archive.
#[derive(Debug, thiserror::Error)]
pub enum ArchiveError {
    /// It cannot be read or decompressed.
    #[error("it cannot be read")]
    Read(#[source] io::Error),
    /// It ends too early.
    #[error("it is truncated: the end mark of the archive is missing")]
    Truncated,
    /// A header's checksum is wrong.
    #[error("it is damaged or no tar archive: the header at byte {at} has a wrong checksum")]
    Checksum {
        /// Where the header begins.
        at: u64,
    },
    /// A header makes no sense.
    #[error("the header at byte {at} makes no sense: {reason}")]
    Header {
        /// Where the header begins.
        at: u64,
        /// Why.
        reason: &'static str,
    },
    /// Compressed in a way we do not read.
    #[error("it is compressed with {0}, which is not read; gzip, zstd and none are")]
    Compression(&'static str),
}

/// One entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Entry {
    /// Its path, as it is in the archive.
    pub(crate) path: Vec<u8>,
    pub(crate) kind: Kind,
    /// Permissions with the set-id and sticky bits.
    pub(crate) mode: u32,
    pub(crate) uid: u64,
    pub(crate) gid: u64,
    /// Seconds and nanoseconds.
    pub(crate) modified: (i64, u32),
    /// Where a link leads.
    pub(crate) link: Vec<u8>,
    /// Bytes of the file, holes included.
    pub(crate) size: u64,
    /// Where its stored bytes belong.
    pub(crate) extents: Vec<Extent>,
    /// The file capabilities it carries.
    pub(crate) capability: Option<Vec<u8>>,
}

/// The archive, read entry by entry.
pub(crate) struct Archive<R> {
    source: R,
    /// Bytes read so far.
    at: u64,
    /// Stored bytes of the current entry that nobody read yet.
    data: u64,
    /// What fills its last block.
    padding: u64,
}

/// What precedes a header and changes it.
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

    /// The source behind the archive's end, and how much of it was read.
    pub(crate) fn into_rest(self) -> (R, u64) {
        (self.source, self.at)
    }

    /// The next entry; what is unread of the one before is passed over.
    pub(crate) fn next(&mut self) -> Result<Option<Entry>, ArchiveError> {
        let mut extensions = Extensions::default();
        loop {
            self.skip()?;
            let begin = self.at;
            let wrong = |reason| ArchiveError::Header { at: begin, reason };
            let Some(block) = self.block()? else { return Err(ArchiveError::Truncated) };
            if block.iter().all(|byte| *byte == 0) {
                return Ok(None);
            }
            let header = Header::parse(&block).map_err(|fault| fault.at(begin))?;
            match header.flag {
                b'L' => extensions.path = Some(self.long_name(&header, begin)?),
                b'K' => extensions.link = Some(self.long_name(&header, begin)?),
                b'x' | b'X' => {
                    let bytes = self.extension(&header, begin)?;
                    extensions.pax = Pax::parse(&bytes).map_err(wrong)?;
                }
                // What would hold for every entry is used for comments only; a label names a tape.
                b'g' | b'V' => self.expect(header.size, begin)?,
                _ => return self.entry(&block, header, extensions, begin).map(Some),
            }
        }
    }

    /// Stored bytes of the current entry; 0 at their end.
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
            Kind::of(header.flag, &path).ok_or_else(|| wrong("it is of a kind nobody unpacks"))?;
        let stored = if kind.has_data() { pax.size.unwrap_or(header.size) } else { 0 };
        self.expect(stored, begin)?;
        let mut size = stored;
        let mut extents = vec![Extent { offset: 0, length: stored }];
        if header.flag == b'S' {
            let more = &mut || self.extra_block();
            (extents, size) =
                sparse::old_map(block, more)?.ok_or_else(|| wrong("its map of holes is wrong"))?;
        } else if let Some(map) = pax.sparse.filter(|_| kind == Kind::File) {
            path = map.name.clone().unwrap_or(path);
            size = map.size.ok_or_else(|| wrong("a sparse file without its size"))?;
            extents = match map.extents() {
                Some(extents) => extents,
                None => sparse::leading_map(&mut || self.leading_block(begin))?
                    .ok_or_else(|| wrong("its map of holes is wrong"))?,
            };
        }
        if !sparse::fits(&extents, self.data, size) {
            return Err(wrong("its map of holes does not fit its content"));
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
        })
    }

    fn long_name(&mut self, header: &Header, begin: u64) -> Result<Vec<u8>, ArchiveError> {
        self.extension(header, begin).map(|bytes| parse_text(&bytes))
    }

    fn extension(&mut self, header: &Header, begin: u64) -> Result<Vec<u8>, ArchiveError> {
        if header.size > MAX_EXTENSION_BYTES {
            return Err(ArchiveError::Header { at: begin, reason: "it is longer than a megabyte" });
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
            return Err(ArchiveError::Header {
                at: begin,
                reason: "its size is beyond every disk",
            });
        }
        (self.data, self.padding) = (stored, padding);
        Ok(())
    }

    // The map of an old sparse file goes on behind its header and is no part of its content.
    fn extra_block(&mut self) -> Result<[u8; BLOCK], ArchiveError> {
        self.block()?.ok_or(ArchiveError::Truncated)
    }

    // The map of a new one is the beginning of its content.
    fn leading_block(&mut self, begin: u64) -> Result<[u8; BLOCK], ArchiveError> {
        if self.data < BLOCK as u64 {
            return Err(ArchiveError::Header { at: begin, reason: "its map of holes has no end" });
        }
        self.data -= BLOCK as u64;
        self.extra_block()
    }

    fn skip(&mut self) -> Result<(), ArchiveError> {
        self.data += std::mem::take(&mut self.padding);
        let mut buffer = [0; 16 * BLOCK];
        while self.read(&mut buffer)? > 0 {}
        Ok(())
    }

    fn block(&mut self) -> Result<Option<[u8; BLOCK]>, ArchiveError> {
        let mut block = [0; BLOCK];
        let mut filled = 0;
        while filled < BLOCK {
            match read_some(&mut self.source, &mut block[filled..]).map_err(ArchiveError::Read)? {
                0 if filled == 0 => return Ok(None),
                0 => return Err(ArchiveError::Truncated),
                length => filled += length,
            }
        }
        self.at += BLOCK as u64;
        Ok(Some(block))
    }
}

/// Reads once, however often a signal comes in between.
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
