//! Parses one header block of a tar. Pure.

use super::ArchiveError;

/// A tar consists of blocks of this size.
pub(super) const BLOCK: usize = 512;

/// The type of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EntryKind {
    File,
    /// Another name of an earlier file.
    HardLink,
    Symlink,
    Folder,
    Fifo,
    /// A character or block device.
    Device,
}

impl EntryKind {
    /// The kind that a header's type flag stands for; `None` when it is not supported.
    pub(super) fn of(flag: u8, path: &[u8]) -> Option<Self> {
        match flag {
            // Tars older than the folder flag mark a folder with a trailing slash.
            0 | b'0' | b'7' if path.ends_with(b"/") => Some(Self::Folder),
            0 | b'0' | b'7' | b'S' => Some(Self::File),
            b'1' => Some(Self::HardLink),
            b'2' => Some(Self::Symlink),
            b'3' | b'4' => Some(Self::Device),
            b'5' => Some(Self::Folder),
            b'6' => Some(Self::Fifo),
            _ => None,
        }
    }
}

pub(super) struct Header {
    pub(super) path: Vec<u8>,
    pub(super) flag: u8,
    pub(super) mode: u32,
    pub(super) uid: u64,
    pub(super) gid: u64,
    pub(super) size: u64,
    pub(super) modified: i64,
    pub(super) link: Vec<u8>,
}

impl Header {
    /// Parses the block at the offset `at`.
    pub(super) fn parse(block: &[u8; BLOCK], at: u64) -> Result<Self, ArchiveError> {
        if !number(&block[148..156]).is_some_and(|sum| sums(block).contains(&sum)) {
            return Err(ArchiveError::Checksum { at });
        }
        let signed = |range: std::ops::Range<usize>, reason| {
            number(&block[range]).ok_or(ArchiveError::Header { at, reason })
        };
        let natural = |range, reason| {
            u64::try_from(signed(range, reason)?).map_err(|_| ArchiveError::Header { at, reason })
        };
        let mut path = parse_text(&block[..100]);
        let prefix = parse_text(&block[345..500]);
        // GNU headers hold other fields where ustar has the prefix.
        if &block[257..263] == b"ustar\0" && !prefix.is_empty() {
            path = [prefix.as_slice(), b"/", &path].concat();
        }
        Ok(Self {
            path,
            flag: block[156],
            mode: u32::try_from(natural(100..108, "its mode is not a number")? & 0o7777)
                .unwrap_or(0),
            uid: natural(108..116, "its owner is not a number")?,
            gid: natural(116..124, "its group is not a number")?,
            size: natural(124..136, "its size is not a number")?,
            modified: signed(136..148, "its time is not a number")?,
            link: parse_text(&block[157..257]),
        })
    }
}

// Some old writers add up signed bytes.
fn sums(block: &[u8; BLOCK]) -> [i64; 2] {
    let mut sums = [0; 2];
    for (at, byte) in block.iter().enumerate() {
        let byte = if (148..156).contains(&at) { b' ' } else { *byte };
        sums[0] += i64::from(byte);
        sums[1] += i64::from(byte.cast_signed());
    }
    sums
}

/// The bytes before the first zero.
pub(super) fn parse_text(field: &[u8]) -> Vec<u8> {
    field.split(|byte| *byte == 0).next().unwrap_or_default().to_vec()
}

/// A number: octal text, or big-endian bytes with the first bit set.
pub(super) fn number(field: &[u8]) -> Option<i64> {
    let first = *field.first()?;
    if first & 0x80 != 0 {
        // Bit 6 is the sign.
        let negative = first & 0x40 != 0;
        let mut value: i128 = i128::from(first & 0x3f) - if negative { 0x40 } else { 0 };
        for byte in &field[1..] {
            value = value * 256 + i128::from(*byte);
        }
        return i64::try_from(value).ok();
    }
    let digits = field
        .iter()
        .skip_while(|byte| **byte == b' ')
        .take_while(|byte| !matches!(**byte, b' ' | 0));
    digits.copied().try_fold(0i64, |value, byte| match byte {
        b'0'..=b'7' => value.checked_mul(8)?.checked_add(i64::from(byte - b'0')),
        _ => None,
    })
}
